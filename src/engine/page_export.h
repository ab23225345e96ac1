// Where the pages of a prompt go that is computed for another engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "transfer/lent_rows.h"

namespace fathom {

// Called by the engine's thread; does not block.
class PageExport {
 public:
  virtual ~PageExport() = default;
  // Page `index` of the text: `rows` [page_bytes], lent; `cached_tokens` of the text were found in
  // the prefix cache. Pages come in order, each once. False: the window is full, the engine tries
  // again.
  virtual bool send(int64_t index, std::shared_ptr<LentRows> rows, int64_t cached_tokens) = 0;
  // Whether rows that were sent are still lent: their pages must keep them.
  virtual bool has_lent() = 0;
  // Takes back what is lent. Pages that were sent come as they were.
  virtual void recall() noexcept = 0;
};

}  // namespace fathom
