#include "cache/page_pool.h"

#include <limits>

#include "base/check.h"

namespace fathom {

PagePool::PagePool(int64_t num_pages) {
  FATHOM_CHECK(num_pages >= 0 && num_pages <= std::numeric_limits<int32_t>::max(), "{} pages",
               num_pages);
  holders_.resize(static_cast<size_t>(num_pages), 0);
  free_.reserve(holders_.size());
  for (int64_t page = num_pages - 1; page >= 0; --page) free_.push_back(static_cast<int32_t>(page));
}

bool PagePool::allocate(int64_t count, std::vector<int32_t>& pages) {
  FATHOM_CHECK(count >= 0, "{} pages", count);
  if (count > free()) return false;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t page = free_.back();
    free_.pop_back();
    holders_[page] = 1;
    pages.push_back(page);
  }
  used_ += count;
  return true;
}

void PagePool::share(int32_t page) {
  check_page(page);
  FATHOM_CHECK(holders_[page] > 0, "page {} is free and cannot be shared", page);
  ++holders_[page];
}

void PagePool::release(int32_t page) {
  check_page(page);
  FATHOM_CHECK(holders_[page] > 0, "page {} is released once too often", page);
  if (--holders_[page] > 0) return;
  free_.push_back(page);
  --used_;
}

void PagePool::release_all(std::vector<int32_t>& pages) {
  for (const int32_t page : pages) release(page);
  pages.clear();
}

int32_t PagePool::holders(int32_t page) const {
  check_page(page);
  return holders_[page];
}

void PagePool::check_invariant() const {
  int64_t held = 0;
  for (const int32_t holders : holders_) held += holders > 0;
  FATHOM_CHECK(held == used_ && free() + used_ == total(), "{} pages held, {} used, {} free of {}",
               held, used_, free(), total());
  std::vector<bool> seen(holders_.size());
  for (const int32_t page : free_) {
    FATHOM_CHECK(holders_[page] == 0 && !seen[page], "page {} is free twice or held", page);
    seen[page] = true;
  }
}

void PagePool::check_page(int32_t page) const {
  FATHOM_CHECK(page >= 0 && page < total(), "page {} of {}", page, total());
}

}  // namespace fathom
