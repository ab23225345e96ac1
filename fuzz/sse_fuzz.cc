// Server-sent events: whatever an event's data is, a reader of the format gets it back as one
// event, and what it reads does not depend on how the bytes are cut.
//
// Input: the size of a piece less one, then what the data of the events is, separated by NUL; the
// same bytes are also read as a stream.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "server/client/sse_parser.h"
#include "server/http/sse.h"

namespace fathom {
namespace {

using Events = std::vector<std::string>;

Events read(std::string_view stream, size_t piece) {
  client::SseParser parser;
  Events events;
  for (size_t at = 0; at < stream.size(); at += piece) {
    parser.feed(stream.substr(at, piece),
                [&](std::string_view data) { events.emplace_back(data); });
  }
  return events;
}

// The one change that the format makes: every line end is a line feed.
std::string with_line_feeds(std::string_view data) {
  std::string lines;
  for (size_t i = 0; i < data.size(); ++i) {
    if (data[i] != '\r') {
      lines += data[i];
    } else if (!data.substr(i + 1).starts_with('\n')) {
      lines += '\n';
    }
  }
  return lines;
}

void check_round_trip(std::string_view text, size_t piece) {
  std::string stream;
  Events expected;
  for (bool more = true; more;) {
    const size_t end = text.find('\0');
    more = end != std::string_view::npos;
    // OpenAI's form and Anthropic's in turn.
    http::append_sse_event(stream, expected.size() % 2 == 0 ? "" : "content_block_delta",
                           text.substr(0, end));
    expected.push_back(with_line_feeds(text.substr(0, end)));
    if (more) text.remove_prefix(end + 1);
  }
  FATHOM_CHECK(stream.ends_with("\n\n"), "the last event is not ended");
  FATHOM_CHECK(read(stream, stream.size()) == expected, "events are read as others: {}", stream);
  FATHOM_CHECK(read(stream, piece) == expected, "pieces change the events: {}", stream);
}

}  // namespace
}  // namespace fathom

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fathom;
  if (size == 0) return 0;
  const size_t piece = size_t{data[0]} + 1;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  check_round_trip(text, piece);
  const Events whole = read(text, size);
  FATHOM_CHECK(read(text, piece) == whole, "pieces change what is read");
  FATHOM_CHECK(read(text, 1) == whole, "single bytes change what is read");
  return 0;
}
