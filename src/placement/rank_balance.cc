#include "placement/rank_balance.h"

#include <algorithm>
#include <vector>

#include "base/check.h"

namespace fathom {
namespace {

// The balance of ranks whose loads are added one after the other.
class BalanceSum {
 public:
  void add_rank(double load) {
    sum_ += load;
    max_ = std::max(max_, load);
    ++ranks_;
  }
  RankBalance balance() const { return {ranks_ > 0 ? sum_ / ranks_ : 0, max_}; }

 private:
  double sum_ = 0, max_ = 0;
  int ranks_ = 0;
};

}  // namespace

RankBalance rank_balance(const RankLists& ranks, std::span<const double> loads) {
  std::vector<int32_t> copies(loads.size());
  for (const auto& experts : ranks) {
    for (const int32_t expert : experts) ++copies[static_cast<size_t>(expert)];
  }
  BalanceSum sum;
  for (const auto& experts : ranks) {
    double load = 0;
    for (const int32_t expert : experts) {
      load += loads[static_cast<size_t>(expert)] / copies[static_cast<size_t>(expert)];
    }
    sum.add_rank(load);
  }
  return sum.balance();
}

RankBalance rank_balance(const ExpertTable& table, int64_t layer, std::span<const double> loads) {
  FATHOM_CHECK(std::ssize(loads) == table.num_experts(), "{} loads of {} experts", loads.size(),
               table.num_experts());
  BalanceSum sum;
  for (int rank = 0; rank < table.num_ranks(); ++rank) {
    double load = 0;
    for (const int32_t expert : table.experts_of(layer, rank)) {
      load += loads[static_cast<size_t>(expert)] /
              static_cast<double>(table.copies_of(layer, expert).size());
    }
    sum.add_rank(load);
  }
  return sum.balance();
}

}  // namespace fathom
