#include "server/http/sse.h"

#include <utility>

namespace fathom::http {
namespace {

void append_line(std::string& out, std::string_view field, std::string_view text) {
  out.append(field).append(text).push_back('\n');
}

// Appends one field per line of text. CR, LF and CRLF end a line, as the SSE format defines.
void append_lines(std::string& out, std::string_view field, std::string_view text) {
  for (size_t end; (end = text.find_first_of("\r\n")) != std::string_view::npos;) {
    append_line(out, field, text.substr(0, end));
    text.remove_prefix(end + (text.substr(end).starts_with("\r\n") ? 2 : 1));
  }
  append_line(out, field, text);
}

}  // namespace

void append_sse_event(std::string& out, std::string_view name, std::string_view data) {
  if (!name.empty()) append_line(out, "event: ", name);
  append_lines(out, "data: ", data);
  out.push_back('\n');
}

SseStream::SseStream(std::shared_ptr<Responder> responder,
                     std::chrono::milliseconds keep_alive_after)
    : responder_(std::move(responder)) {
  responder_->start_stream({.status = 200,
                            .content_type = std::string(kSseContentType),
                            .headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}},
                            .keep_alive = ": keep-alive\n\n",
                            .keep_alive_after = keep_alive_after});
}

void SseStream::data(std::string_view payload) { event({}, payload); }

void SseStream::event(std::string_view name, std::string_view payload) {
  std::string text;
  text.reserve(name.size() + payload.size() + 32);
  append_sse_event(text, name, payload);
  responder_->write(text);
}

void SseStream::comment(std::string_view text) {
  std::string lines;
  append_lines(lines, ": ", text);
  lines.push_back('\n');
  responder_->write(lines);
}

void SseStream::events(std::string_view formatted) { responder_->write(formatted); }

void SseStream::done() {
  responder_->write("data: [DONE]\n\n");
  end();
}

void SseStream::end() { responder_->end(); }

}  // namespace fathom::http
