// Server-sent events over a Responder, for streamed completions. OpenAI uses the "data" field
// alone; Anthropic and /v1/responses use "event" and "data".
//
// The comment ": keep-alive" is sent whenever nothing was written for 15 s: clients ignore it,
// proxies keep the connection open. Threads and disconnects: see responder.h.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>

#include "server/http/responder.h"

namespace fathom::http {

inline constexpr std::string_view kSseContentType = "text/event-stream";
inline constexpr std::chrono::milliseconds kSseKeepAliveAfter{15'000};

// Appends one event to `out`. Each line of `data` becomes a "data" field. `name` must be one line.
void append_sse_event(std::string& out, std::string_view name, std::string_view data);

class SseStream {
 public:
  // Starts the stream with status 200 and headers that disable proxy buffering.
  explicit SseStream(std::shared_ptr<Responder> responder,
                     std::chrono::milliseconds keep_alive_after = kSseKeepAliveAfter);

  void data(std::string_view payload);                          // data: payload
  void event(std::string_view name, std::string_view payload);  // event: name, data: payload
  void comment(std::string_view text);                          // ": text", ignored by clients
  // Writes several events made by append_sse_event at once.
  void events(std::string_view formatted);

  // Writes "data: [DONE]" and ends the stream.
  void done();
  // Ends the stream without [DONE]: after an error event, and in Anthropic's form.
  void end();

  Responder& responder() const { return *responder_; }

 private:
  const std::shared_ptr<Responder> responder_;
};

}  // namespace fathom::http
