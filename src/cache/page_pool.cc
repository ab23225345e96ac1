#include "cache/page_pool.h"

#include <limits>

#include "base/check.h"

namespace fathom {

PagePool::PagePool(int64_t num_pages) {
  FATHOM_CHECK(num_pages >= 0 && num_pages <= std::numeric_limits<int32_t>::max(), "{} pages",
               num_pages);
  pages_.resize(static_cast<size_t>(num_pages));
  free_.reserve(pages_.size());
  for (int64_t page = num_pages - 1; page >= 0; --page) free_.push_back(static_cast<int32_t>(page));
}

bool PagePool::allocate(int64_t count, std::vector<int32_t>& pages) {
  FATHOM_CHECK(count >= 0, "{} pages", count);
  if (count > free()) return false;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t page = free_.back();
    pages.push_back(page);  // first, because it may throw: the list's owner has the pages
    free_.pop_back();
    pages_[page].holders = 1;
    ++used_;
  }
  return true;
}

void PagePool::share(int32_t page) {
  Page& shared = at(page);
  FATHOM_CHECK((shared.holders > 0 || shared.kept || shared.in_transfer) && !shared.quarantined,
               "page {} is free or quarantined and cannot be shared", page);
  if (shared.holders++ > 0) return;
  if (shared.in_transfer) {
    --leaving_;
    return;
  }
  --cached_;
  ++used_;
}

void PagePool::release(int32_t page) {
  Page& released = at(page);
  FATHOM_CHECK(released.holders > 0, "page {} is released once too often", page);
  if (--released.holders > 0) return;
  if (released.in_transfer) {
    ++leaving_;
    return;
  }
  if (released.quarantined) return;
  --used_;
  if (released.kept) {
    ++cached_;
  } else {
    free_.push_back(page);
  }
}

void PagePool::keep(int32_t page) {
  Page& kept = at(page);
  FATHOM_CHECK(kept.holders > 0 && !kept.kept && !kept.in_transfer && !kept.quarantined,
               "page {} has {} holders and cannot be kept", page, kept.holders);
  kept.kept = true;
}

void PagePool::drop(int32_t page) {
  Page& dropped = at(page);
  FATHOM_CHECK(dropped.kept, "page {} is dropped but was not kept", page);
  dropped.kept = false;
  if (dropped.holders > 0) return;
  --cached_;
  free_.push_back(page);
}

void PagePool::begin_transfer(int32_t page) {
  Page& moved = at(page);
  FATHOM_CHECK((moved.holders > 0) != moved.kept && !moved.in_transfer && !moved.quarantined,
               "page {} has {} holders and cannot be copied", page, moved.holders);
  if (moved.kept) {
    moved.kept = false;
    --cached_;
    ++leaving_;
  } else {
    --used_;
  }
  moved.in_transfer = true;
  ++in_transfer_;
}

void PagePool::end_transfer(int32_t page) {
  Page& moved = at(page);
  FATHOM_CHECK(moved.in_transfer, "page {} is not in transfer", page);
  moved.in_transfer = false;
  --in_transfer_;
  if (moved.holders > 0) {
    ++used_;
  } else {
    --leaving_;
    free_.push_back(page);
  }
}

void PagePool::begin_quarantine(int32_t page) {
  Page& awaited = at(page);
  FATHOM_CHECK(
      awaited.holders == 1 && !awaited.kept && !awaited.in_transfer && !awaited.quarantined,
      "page {} has {} holders and cannot be quarantined", page, awaited.holders);
  awaited.quarantined = true;
  --used_;
  ++quarantined_;
}

void PagePool::end_quarantine(int32_t page) {
  Page& awaited = at(page);
  FATHOM_CHECK(awaited.quarantined, "page {} is not quarantined", page);
  awaited.quarantined = false;
  --quarantined_;
  if (awaited.holders > 0) {
    ++used_;
  } else {
    free_.push_back(page);
  }
}

bool PagePool::is_quarantined(int32_t page) const {
  return const_cast<PagePool*>(this)->at(page).quarantined;
}

bool PagePool::is_in_transfer(int32_t page) const {
  return const_cast<PagePool*>(this)->at(page).in_transfer;
}

int32_t PagePool::holders(int32_t page) const {
  return const_cast<PagePool*>(this)->at(page).holders;
}

void PagePool::check_invariant() const {
  int64_t held = 0, cached = 0, in_transfer = 0, leaving = 0, quarantined = 0;
  for (const Page& page : pages_) {
    in_transfer += page.in_transfer;
    leaving += page.in_transfer && page.holders == 0;
    quarantined += page.quarantined;
    held += page.holders > 0 && !page.in_transfer && !page.quarantined;
    cached += page.holders == 0 && page.kept;
  }
  FATHOM_CHECK(
      held == used_ && cached == cached_ && in_transfer == in_transfer_ && leaving == leaving_ &&
          quarantined == quarantined_ &&
          free() + cached_ + used_ + in_transfer_ + quarantined_ == total(),
      "{} pages held, {} used, {} cached of {}, {} in transfer of {}, {} leaving of {}, {} "
      "quarantined of {}, {} free of {}",
      held, used_, cached, cached_, in_transfer, in_transfer_, leaving, leaving_, quarantined,
      quarantined_, free(), total());
  std::vector<bool> seen(pages_.size());
  for (const int32_t page : free_) {
    const Page& unused = pages_[page];
    FATHOM_CHECK(unused.holders == 0 && !unused.kept && !unused.in_transfer &&
                     !unused.quarantined && !seen[page],
                 "page {} is free twice, held, kept, in transfer or quarantined", page);
    seen[page] = true;
  }
}

PagePool::Page& PagePool::at(int32_t page) {
  FATHOM_CHECK(page >= 0 && page < total(), "page {} of {}", page, total());
  return pages_[page];
}

}  // namespace fathom
