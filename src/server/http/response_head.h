// The bytes of an answer's head, and of a chunk's frame.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "server/http/message.h"

namespace fathom::http {

struct ResponseHead {
  int status = 200;
  std::string_view content_type;  // empty: none
  const Headers& headers;         // the handler's; those that the server owns are left out
  std::optional<int64_t> content_length;
  bool chunked = false;
  bool close = false;
  std::string_view request_id;
  std::string_view cors_origin;  // empty: none
};

// Status line, fields and the empty line. Control characters in values become spaces, so that no
// value can begin another field. Any thread.
void append_response_head(std::string& out, const ResponseHead& head);

// What every head begins with.
inline constexpr std::string_view kProbe = "HTTP/1.1 ";

// The line before `size` bytes of a chunk; behind them stands kChunkEnd.
void append_chunk_begin(std::string& out, int64_t size);
inline constexpr std::string_view kChunkEnd = "\r\n";
inline constexpr std::string_view kLastChunk = "0\r\n\r\n";

}  // namespace fathom::http
