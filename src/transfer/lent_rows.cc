#include "transfer/lent_rows.h"

#include <new>
#include <utility>

namespace fathom {

void LentRows::recall() noexcept {
  if (is_own_ || !is_lent()) return;
  const std::lock_guard lock(mutex_);
  try {
    own_.assign(rows_.begin(), rows_.end());
  } catch (const std::bad_alloc&) {
  }
  rows_ = own_;
}

std::shared_ptr<LentRows> lend(std::shared_ptr<LentRows> rows) {
  LentRows* const lent = rows.get();
  lent->is_lent_.store(true, std::memory_order_relaxed);
  return {lent, [rows = std::move(rows)](LentRows* read) {
            read->is_lent_.store(false, std::memory_order_release);
          }};
}

}  // namespace fathom
