// Where the pages of a prompt go that is computed for another engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace fathom {

class PageExport {
 public:
  virtual ~PageExport() = default;
  // Page `index` of the text: `rows` [page_bytes]; `cached_tokens` of the text were found in the
  // prefix cache. Pages come in order, each once. False: the window is full, the engine tries
  // again. Called by the engine's thread; does not block.
  virtual bool send(int64_t index, std::span<const std::byte> rows, int64_t cached_tokens) = 0;
};

}  // namespace fathom
