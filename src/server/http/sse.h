// Server-sent events over a Responder: what a streamed completion is written with. The field
// "data" alone is OpenAI's form, "event" and "data" Anthropic's and that of /v1/responses.
//
// While nothing is written for 15 s the comment ": keep-alive" goes out, which clients ignore and
// proxies count as life. Threads and the client's disconnect are as in responder.h.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>

#include "server/http/responder.h"

namespace fathom::http {

inline constexpr std::string_view kSseContentType = "text/event-stream";
inline constexpr std::chrono::milliseconds kSseKeepAliveAfter{15'000};

// Appends one event to `out`. Every line of `data` gets a field of its own; a name must have none.
void append_sse_event(std::string& out, std::string_view name, std::string_view data);

class SseStream {
 public:
  // Starts the stream with status 200 and the headers that keep proxies from buffering it.
  explicit SseStream(std::shared_ptr<Responder> responder,
                     std::chrono::milliseconds keep_alive_after = kSseKeepAliveAfter);

  void data(std::string_view payload);                          // data: payload
  void event(std::string_view name, std::string_view payload);  // event: name, data: payload
  void comment(std::string_view text);                          // ": text", which clients ignore
  // Several events that append_sse_event made, in one go.
  void events(std::string_view formatted);

  void done();  // data: [DONE], and the end
  void end();   // the end alone: after an error event, and in Anthropic's form

  Responder& responder() const { return *responder_; }

 private:
  const std::shared_ptr<Responder> responder_;
};

}  // namespace fathom::http
