#include "ops/moe/exchange_cuda/moe_over_ranks_cuda.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "ops/moe/bf16_cuda/moe_many_rows_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_many_rows_cuda.h"

namespace fathom::cuda {
namespace {

// The rows of x that this rank offers and whose shared expert it computes.
void narrow(MoeArguments& a, const RowShare& own) {
  a.x = static_cast<const std::byte*>(a.x) + own.first * a.shape.hidden * 2;
  a.rows = static_cast<int32_t>(own.count);
}
void narrow(ScaledMoeArguments& a, const RowShare& own) {
  a.x = static_cast<const std::byte*>(a.x) + own.first * a.shape.hidden;
  a.x_scales += own.first;
  a.rows = static_cast<int32_t>(own.count);
}

void products(const MoeArguments& a, const MoeManyRowsPlan& plan, GpuStream stream) {
  moe_many_rows_products(a, plan, stream);
}
void products(const ScaledMoeArguments& a, const MoeManyRowsPlan& plan, GpuStream stream) {
  scaled_moe_many_rows_products(a, plan, stream);
}

MoeManyRowsSizes sizes(const MoeShape& shape, int64_t rows, bool scaled) {
  return scaled ? scaled_moe_many_rows_sizes(shape, rows) : moe_many_rows_sizes(shape, rows);
}

template <typename Arguments>
void over_ranks(const Arguments& a, int64_t scales_stride, bool scaled, const ExpertExchange& e,
                const ExpertHost* hosts, const ExchangeStep& step, GpuStream stream) {
  const ExchangePeer& mine = e.ranks[e.peers.rank];
  FATHOM_CHECK(a.rows <= e.capacity && a.shape.hidden == e.hidden &&
                   a.shape.experts_per_token == e.experts_per_token &&
                   (a.rows == 0 || (a.expert_ids == mine.expert_ids && a.x == mine.x)),
               "{} rows of {}, {} experts a token; the exchange has {}, {} and {}", a.rows,
               a.shape.hidden, a.shape.experts_per_token, e.capacity, e.hidden,
               e.experts_per_token);
  const RowShare own = share_of_rows(a.rows, step.ranks_alike, step.rank_alike);
  Arguments experts = a;
  narrow(experts, own);
  if (own.count == 0) experts.shape.shared_inter = 0;
  const MoeManyRowsSizes all = sizes(a.shape, e.capacity, scaled);
  const auto [rounds, rows] = plan_exchange_rounds(step.all_rows, e.capacity, e.peers.ranks);
  const int64_t likely = step.likely_rows > 0 ? std::min(rows, step.likely_rows) : rows;
  const bool in_turn = step.in_turn != nullptr && rounds > 1;
  const std::byte* const shared_results =
      experts.shape.shared_inter > 0 ? e.workspace + e.plan.moe_at + e.plan.moe.shared_result_at
                                     : nullptr;
  const GpuStream beside = in_turn ? GpuStream(stream.device(), step.in_turn->stream) : stream;
  const auto exchange_of = [&](int64_t round) -> const ExpertExchange& {
    return in_turn && round % 2 == 1 ? *step.odd_rounds : e;
  };
  MoeManyRowsPlan plan;  // of the round
  const auto dispatch = [&](int64_t round) {
    plan = plan_exchange_round(exchange_of(round).plan, all, likely, e.num_experts);
    if (in_turn) plan.spare_sms = step.spare_sms;
    dispatch_experts({.exchange = exchange_of(round),
                      .moe = plan,
                      .hosts = hosts,
                      .own = own,
                      .num_valid_rows = step.num_valid_rows,
                      .scales_stride = scales_stride,
                      .num_slots = a.shape.num_experts,
                      .round = static_cast<int32_t>(round),
                      .rounds = static_cast<int32_t>(rounds),
                      .most_rows = static_cast<int32_t>(rows),
                      .sms = step.sms},
                     beside);
  };
  const auto multiply = [&](int64_t round, const MoeManyRowsPlan& of_round) {
    experts.workspace = exchange_of(round).workspace + exchange_of(round).plan.moe_at;
    products(experts, of_round, stream);
    experts.shape.shared_inter = 0;  // its results stay where they are
  };
  const auto combine = [&](int64_t round) {
    combine_experts_of_ranks({.exchange = exchange_of(round),
                              .hosts = hosts,
                              .weights = a.expert_weights,
                              .shared_results = shared_results,
                              .own = own,
                              .rows = a.rows,
                              .round = static_cast<int32_t>(round),
                              .out = a.out,
                              .out_type = a.out_type},
                             beside);
  };
  if (!in_turn) {
    for (int64_t round = 0; round < rounds; ++round) {
      dispatch(round);
      multiply(round, plan);
      combine(round);
    }
    return;
  }
  const StreamMark &dispatched = step.in_turn->dispatched, &multiplied = step.in_turn->multiplied;
  multiplied.set(stream);  // x and ids are there
  multiplied.await(beside);
  dispatch(0);
  dispatched.set(beside);
  for (int64_t round = 0; round < rounds; ++round) {
    dispatched.await(stream);
    const MoeManyRowsPlan of_round = plan;
    if (round + 1 < rounds) {
      dispatch(round + 1);
      dispatched.set(beside);
    }
    multiply(round, of_round);
    multiplied.set(stream);
    multiplied.await(beside);
    combine(round);
  }
  dispatched.set(beside);
  dispatched.await(stream);
}

}  // namespace

ExpertExchangePlan plan_moe_exchange(const MoeShape& shape, int64_t capacity, bool scaled) {
  return plan_expert_exchange(sizes(shape, room_of_exchange(capacity), scaled));
}

void moe_over_ranks(const MoeArguments& arguments, const ExpertExchange& exchange,
                    const ExpertHost* hosts, const ExchangeStep& step, GpuStream stream) {
  over_ranks(arguments, 0, false, exchange, hosts, step, stream);
}

void scaled_moe_over_ranks(const ScaledMoeArguments& arguments, const ExpertExchange& exchange,
                           const ExpertHost* hosts, const ExchangeStep& step, GpuStream stream) {
  over_ranks(arguments, arguments.x_scales_stride, true, exchange, hosts, step, stream);
}

}  // namespace fathom::cuda
