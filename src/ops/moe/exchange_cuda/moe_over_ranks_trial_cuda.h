// Ranks over which the experts of a problem are spread, on the GPUs that there are: for the test
// and the benchmark of moe_over_ranks().
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/math.h"
#include "device/cuda/device_context.h"
#include "device/cuda/peer_group.h"
#include "device/cuda/trial_devices.h"
#include "ops/moe/bf16_cuda/moe_problem_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_problem_cuda.h"
#include "ops/moe/exchange_cuda/moe_over_ranks_cuda.h"

namespace fathom::cuda {

// [expert] its rank and slot. Consecutive experts by rank, or mixed.
inline std::vector<ExpertHost> spread_experts(int experts, int ranks, bool mixed,
                                              std::mt19937& random) {
  std::vector<int32_t> order(static_cast<size_t>(experts));
  for (int e = 0; e < experts; ++e) order[static_cast<size_t>(e)] = e;
  if (mixed) std::shuffle(order.begin(), order.end(), random);
  std::vector<ExpertHost> hosts(static_cast<size_t>(experts));
  std::vector<int32_t> slots(static_cast<size_t>(ranks));
  for (int i = 0; i < experts; ++i) {
    const int rank = static_cast<int>(int64_t{i} * ranks / experts);
    hosts[static_cast<size_t>(order[static_cast<size_t>(i)])] = {
        rank, slots[static_cast<size_t>(rank)]++};
  }
  return hosts;
}

// Experts in bf16, and in e4m3 with scales.
struct Bf16Experts {
  using Problem = MoeProblem;
  using Arguments = MoeArguments;
  static constexpr bool kScaled = false;
  static constexpr int kValueBytes = 2;

  struct Weights {
    DeviceArray<uint16_t> gate_up, down, shared_gate_up, shared_down;
  };
  static void set(MoeArguments& a, const Weights& weights, const void* x, const float*, int64_t) {
    a.gate_up = weights.gate_up.data();
    a.down = weights.down.data();
    a.shared_gate_up = weights.shared_gate_up.data();
    a.shared_down = weights.shared_down.data();
    a.x = x;
  }
  static void run(const MoeArguments& a, const ExpertExchange& exchange, const ExpertHost* hosts,
                  const ExchangeStep& step, GpuStream stream) {
    moe_over_ranks(a, exchange, hosts, step, stream);
  }
  static void run_alone(const MoeArguments& a, GpuStream stream) { moe_many_rows(a, stream); }
};

struct E4m3Experts {
  using Problem = ScaledMoeProblem;
  using Arguments = ScaledMoeArguments;
  static constexpr bool kScaled = true;
  static constexpr int kValueBytes = 1;

  struct Weights {
    ScaledMatrices gate_up, down, shared_gate_up, shared_down;
  };
  static void set(ScaledMoeArguments& a, const Weights& weights, const void* x, const float* scales,
                  int64_t stride) {
    a.gate_up = weights.gate_up.values.data();
    a.gate_up_scales = weights.gate_up.scales.data();
    a.down = weights.down.values.data();
    a.down_scales = weights.down.scales.data();
    a.shared_gate_up = weights.shared_gate_up.values.data();
    a.shared_gate_up_scales = weights.shared_gate_up.scales.data();
    a.shared_down = weights.shared_down.values.data();
    a.shared_down_scales = weights.shared_down.scales.data();
    a.x = x;
    a.x_scales = scales;
    a.x_scales_stride = stride;
  }
  static void run(const ScaledMoeArguments& a, const ExpertExchange& exchange,
                  const ExpertHost* hosts, const ExchangeStep& step, GpuStream stream) {
    scaled_moe_over_ranks(a, exchange, hosts, step, stream);
  }
  static void run_alone(const ScaledMoeArguments& a, GpuStream stream) {
    scaled_moe_many_rows(a, stream);
  }
};

// A copy on the current device.
template <typename T>
DeviceArray<T> copy_of(const DeviceArray<T>& from) {
  DeviceArray<T> to(from.size());
  check(cudaMemcpy(to.data(), from.data(), from.bytes(), cudaMemcpyDefault), "copying weights");
  return to;
}
inline ScaledMatrices copy_of(const ScaledMatrices& from) {
  return {copy_of(from.values), copy_of(from.scales)};
}

// Copies each slot's matrix to its place, on the current device: `from` has `each` elements an
// expert.
template <typename T>
DeviceArray<T> take_slots(const DeviceArray<T>& from, int64_t each, int rank,
                          const std::vector<ExpertHost>& hosts) {
  int64_t slots = 0;
  for (const ExpertHost& host : hosts) slots += host.rank == rank ? 1 : 0;
  DeviceArray<T> to(slots * each);
  for (size_t e = 0; e < hosts.size(); ++e) {
    if (hosts[e].rank != rank) continue;
    check(cudaMemcpy(to.data() + hosts[e].slot * each, from.data() + static_cast<int64_t>(e) * each,
                     static_cast<size_t>(each) * sizeof(T), cudaMemcpyDefault),
          "copying an expert");
  }
  return to;
}

inline Bf16Experts::Weights take_weights(const MoeProblem& p, int rank,
                                         const std::vector<ExpertHost>& hosts) {
  const int64_t matrix = int64_t{p.shape.inter} * p.shape.hidden;
  return {take_slots(p.gate_up, 2 * matrix, rank, hosts), take_slots(p.down, matrix, rank, hosts),
          copy_of(p.shared_gate_up), copy_of(p.shared_down)};
}
inline E4m3Experts::Weights take_weights(const ScaledMoeProblem& p, int rank,
                                         const std::vector<ExpertHost>& hosts) {
  const int64_t matrix = int64_t{p.shape.inter} * p.shape.hidden, blocks = matrix / 128 / 128;
  return {{take_slots(p.gate_up.values, 2 * matrix, rank, hosts),
           take_slots(p.gate_up.scales, 2 * blocks, rank, hosts)},
          {take_slots(p.down.values, matrix, rank, hosts),
           take_slots(p.down.scales, blocks, rank, hosts)},
          copy_of(p.shared_gate_up),
          copy_of(p.shared_down)};
}

// The ranks of a problem whose rows are divided over lanes of `alike` ranks, which have the same
// rows: lane l has rows[l] of them. Rows of a problem follow one another by lane. The problem may
// be on any of the devices.
template <typename Experts>
class RanksTrial {
 public:
  using Problem = typename Experts::Problem;

  struct Rank {
    const int device;  // current before the arrays are made
    DeviceArray<ExpertHost> hosts;
    typename Experts::Weights weights;
    DeviceArray<uint8_t> x;
    DeviceArray<float> scales;
    DeviceArray<int32_t> ids, valid;
    DeviceArray<float> expert_weights, out;
    DeviceArray<std::byte> workspaces[2];
    ExpertExchange exchanges[2];  // of even and of odd rounds
    const RoundsInTurn in_turn;
    int64_t first = 0, rows = 0, stride = 0;  // its lane's rows of the problem
    int32_t slots = 0;

    Rank(int on, const std::vector<ExpertHost>& all_hosts)
        : device(use_device(on)), hosts(all_hosts) {
      check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream");
    }
    ~Rank() { cudaStreamDestroy(stream_); }
    Rank(const Rank&) = delete;
    Rank& operator=(const Rank&) = delete;

    // Its stream, with its device made current for what is enqueued there.
    cudaStream_t stream() const {
      use_device(device);
      return stream_;
    }

   private:
    cudaStream_t stream_ = nullptr;
  };

  RanksTrial(const Problem& problem, const std::vector<int64_t>& rows, int alike, int64_t capacity,
             bool mixed, std::chrono::nanoseconds limit)
      : shape_(problem.shape),
        alike_(alike),
        capacity_(capacity),
        group_(trial_devices(static_cast<int>(rows.size()) * alike), 1, 8, limit) {
    std::mt19937 random(17);
    hosts_ = spread_experts(shape_.num_experts, group_.size(), mixed, random);
    int64_t first = 0;
    for (size_t lane = 0; lane < rows.size(); ++lane) {
      for (int i = 0; i < alike; ++i) add_rank(problem, first, rows[lane]);
      first += rows[lane];
    }
    all_rows_ = first;
    join();
    take_rows(problem);
  }
  // Leaves the first device current.
  ~RanksTrial() { cudaSetDevice(0); }
  RanksTrial(const RanksTrial&) = delete;
  RanksTrial& operator=(const RanksTrial&) = delete;

  int size() const { return group_.size(); }
  Rank& rank(int r) { return *ranks_[static_cast<size_t>(r)]; }
  PeerGroup& group() { return group_; }

  // Copies a problem's rows of each rank to where it has its own: of the same shape and rows.
  void take_rows(const Problem& problem) {
    for (const auto& rank : ranks_) {
      use_device(rank->device);
      put_rows(problem, *rank, nullptr);
      poison(*rank);
    }
  }
  // The same in a stream of the rank's device.
  void put_rows(const Problem& problem, const Rank& rank, cudaStream_t stream) const {
    const int64_t row_bytes = int64_t{shape_.hidden} * Experts::kValueBytes;
    const int64_t k = shape_.experts_per_token;
    const auto put = [&](void* to, const void* from, int64_t bytes) {
      if (bytes == 0) return;
      check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream),
            "copying rows");
    };
    const auto* const x = reinterpret_cast<const uint8_t*>(problem.x.data());
    put(rank.x.data(), x + rank.first * row_bytes, rank.rows * row_bytes);
    put(rank.ids.data(), problem.ids.data() + rank.first * k, rank.rows * k * 4);
    put(rank.expert_weights.data(), problem.weights.data() + rank.first * k, rank.rows * k * 4);
    if constexpr (Experts::kScaled) {
      for (int64_t block = 0; block < shape_.hidden / 128; ++block) {
        put(rank.scales.data() + block * rank.stride,
            problem.x_scales.data() + block * problem.x_scales_stride + rank.first, rank.rows * 4);
      }
    }
  }

  // Everything that a step writes, and what no row of the step has.
  void poison(const Rank& rank) const {
    use_device(rank.device);
    check(cudaMemset(rank.out.data(), 0xFF, rank.out.bytes()), "poisoning");
    for (const ExpertExchange& exchange : rank.exchanges) {
      // All but what the ranks publish.
      const ExpertExchangePlan& plan = exchange.plan;
      check(cudaMemset(exchange.workspace + plan.window_at, 0xFF,
                       static_cast<size_t>(plan.workspace_bytes - plan.window_at)),
            "poisoning");
    }
    check(cudaDeviceSynchronize(), "poisoning");
  }

  ExchangeStep step(int r) const {
    use_device(ranks_[static_cast<size_t>(r)]->device);
    return {
        .all_rows = all_rows_,
        .ranks_alike = alike_,
        .rank_alike = r % alike_,
        .sms = group_.rank(r).shares_device ? 2 : DeviceContext::current().num_multiprocessors()};
  }
  // With its rounds in turn.
  ExchangeStep step_in_turn(int r, int spare_sms) const {
    const Rank& rank = *ranks_[static_cast<size_t>(r)];
    ExchangeStep result = step(r);
    result.in_turn = &rank.in_turn;
    result.odd_rounds = &rank.exchanges[1];
    result.spare_sms = spare_sms;
    return result;
  }

  void enqueue(const Problem& problem, int r, const ExchangeStep& step, void* out = nullptr,
               DType out_type = DType::kF32) {
    const Rank& rank = this->rank(r);
    typename Experts::Arguments a = problem.arguments(out_type);
    a.shape.num_experts = rank.slots;
    a.rows = static_cast<int32_t>(rank.rows);
    a.expert_ids = rank.ids.data();
    a.expert_weights = rank.expert_weights.data();
    a.out = out != nullptr ? out : rank.out.data();
    a.workspace = nullptr;
    Experts::set(a, rank.weights, rank.x.data(), rank.scales.data(), rank.stride);
    Experts::run(a, rank.exchanges[0], rank.hosts.data(), step, rank.stream());
  }

  // Calls enqueue(rank) for all ranks in a new order each time, some long after the others.
  template <typename Enqueue>
  void on_all(std::mt19937& random, const Enqueue& enqueue) {
    std::vector<int> order;
    for (int r = 0; r < size(); ++r) order.push_back(r);
    std::shuffle(order.begin(), order.end(), random);
    for (const int r : order) {
      if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(400));
      enqueue(r);
    }
  }

  void wait() {
    for (const auto& rank : ranks_) check(cudaStreamSynchronize(rank->stream()), "ranks");
  }

 private:
  void add_rank(const Problem& problem, int64_t first, int64_t rows) {
    const auto number = static_cast<int>(ranks_.size());
    auto rank = std::make_unique<Rank>(trial_devices(number + 1).back(), hosts_);
    rank->weights = take_weights(problem, number, hosts_);
    rank->first = first;
    rank->rows = rows;
    // Room for a round's rows, and strides of their own.
    rank->stride = round_up(capacity_, 4) + 4 * number;
    const int64_t k = shape_.experts_per_token;
    rank->x = DeviceArray<uint8_t>(capacity_ * shape_.hidden * Experts::kValueBytes);
    rank->scales = DeviceArray<float>(ceil_div(shape_.hidden, int64_t{128}) * rank->stride);
    rank->ids = DeviceArray<int32_t>(capacity_ * k);
    rank->expert_weights = DeviceArray<float>(capacity_ * k);
    rank->valid = DeviceArray<int32_t>(1);
    rank->out = DeviceArray<float>(std::max<int64_t>(rows, 1) * shape_.hidden);
    check(cudaMemset(rank->x.data(), 0xFF, rank->x.bytes()), "poisoning");
    check(cudaMemset(rank->scales.data(), 0xFF, rank->scales.bytes()), "poisoning");
    check(cudaMemset(rank->ids.data(), 0, rank->ids.bytes()), "clearing ids");
    for (const ExpertHost& host : hosts_) rank->slots += host.rank == number ? 1 : 0;
    MoeShape shape = shape_;
    shape.num_experts = rank->slots;
    for (int odd = 0; odd < 2; ++odd) {
      ExpertExchange& exchange = rank->exchanges[odd];
      exchange.plan = plan_moe_exchange(shape, capacity_, Experts::kScaled);
      DeviceArray<std::byte>& workspace = rank->workspaces[odd];
      workspace = DeviceArray<std::byte>(exchange.plan.workspace_bytes);
      check(cudaMemset(workspace.data(), 0, workspace.bytes()), "clearing workspace");
      exchange.workspace = workspace.data();
      exchange.peers = group_.rank(number);
      exchange.capacity = static_cast<int32_t>(capacity_);
      exchange.num_experts = shape_.num_experts;
      exchange.experts_per_token = shape_.experts_per_token;
      exchange.hidden = shape_.hidden;
      exchange.x_vectors = shape_.hidden * Experts::kValueBytes / 16;
      exchange.scale_blocks = Experts::kScaled ? shape_.hidden / 128 : 0;
      shape.shared_inter = 0;
    }
    ranks_.push_back(std::move(rank));
  }

  void join() {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const Rank& of = *ranks_[r];
      for (const int odd : {0, 1}) {
        ExchangePeer peer = exchange_peer(of.exchanges[odd].plan, of.exchanges[odd].workspace);
        peer.expert_ids = of.ids.data();
        peer.x = of.x.data();
        peer.x_scales = of.scales.data();
        for (const auto& rank : ranks_) rank->exchanges[odd].ranks[r] = peer;
      }
    }
  }

  const MoeShape shape_;
  const int alike_;
  const int64_t capacity_;
  PeerGroup group_;
  std::vector<ExpertHost> hosts_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  int64_t all_rows_ = 0;
};

}  // namespace fathom::cuda
