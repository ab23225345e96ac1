// Serializes response heads and chunk framing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "server/http/message.h"

namespace fathom::http {

struct ResponseHead {
  int status = 200;
  std::string_view content_type;  // empty: not sent
  // The handler's fields. Those that the server sets itself are skipped.
  const Headers& headers;
  std::optional<int64_t> content_length;
  bool chunked = false;
  bool close = false;
  std::string_view request_id;
  std::string_view cors_origin;  // empty: not sent
};

// Appends status line, fields and the empty line. Control characters in values become spaces, so
// that no value can inject another field. Any thread may call.
void append_response_head(std::string& out, const ResponseHead& head);

// The first bytes of every head.
inline constexpr std::string_view kProbe = "HTTP/1.1 ";

// Appends the size line of a chunk of `size` bytes. kChunkEnd follows the bytes.
void append_chunk_begin(std::string& out, int64_t size);
inline constexpr std::string_view kChunkEnd = "\r\n";
inline constexpr std::string_view kLastChunk = "0\r\n\r\n";

}  // namespace fathom::http
