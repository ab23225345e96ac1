// Rows of a page on loan: whoever sends them reads the page where it lies, without a copy.
//
// The lender leaves the rows as they are while they are lent, or until recall() has returned. The
// reader may be another thread, and may take as long as it likes: recall() copies the rows for it.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace fathom {

class LentRows {
 public:
  // Memory of the lender's.
  explicit LentRows(std::span<const std::byte> rows) : size_(rows.size()), rows_(rows) {}
  // Memory of its own, which need not be recalled.
  explicit LentRows(std::vector<std::byte> rows)
      : size_(rows.size()), is_own_(true), own_(std::move(rows)), rows_(own_) {}

  size_t size() const { return size_; }  // bytes, also after a recall
  bool is_own() const { return is_own_; }

  // The reader's: calls use(rows) with the rows, which stay where they are until it returns. They
  // are empty if a recall found no memory to copy them.
  template <typename Use>
  auto read(Use&& use) {
    const std::lock_guard lock(mutex_);
    return use(rows_);
  }

  // The lender's: whether a reader's handle is left.
  bool is_lent() const { return is_lent_.load(std::memory_order_acquire); }
  // Nobody reads the lender's memory any more. Waits for a use() that is going on.
  void recall() noexcept;
  // Memory of its own, to be written while it is not lent.
  std::span<std::byte> own() { return own_; }

 private:
  friend std::shared_ptr<LentRows> lend(std::shared_ptr<LentRows> rows);
  const size_t size_;
  const bool is_own_ = false;
  std::atomic<bool> is_lent_{false};
  std::mutex mutex_;
  std::vector<std::byte> own_;
  std::span<const std::byte> rows_;
};

// The reader's handle: the rows are lent until its last copy is destroyed.
std::shared_ptr<LentRows> lend(std::shared_ptr<LentRows> rows);

}  // namespace fathom
