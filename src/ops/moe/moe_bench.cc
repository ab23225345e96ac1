// Benchmark of the mixture of experts: bytes of the experts that the tokens reach, and operations,
// relative to the read and multiply rates that the probe measures in the same process.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <vector>

#include "base/random.h"
#include "bench/probe/probe.h"
#include "ops/moe/moe.h"

namespace fathom {
namespace {

struct Shape {
  const char* name;
  int64_t hidden, intermediate, shared;
  int num_experts, per_token;
};
const Shape kShapes[] = {{"tiny", 256, 128, 128, 16, 4}, {"v2lite", 2048, 1408, 2816, 64, 6}};

ThreadPool& pool() {
  static ThreadPool all(0);
  return all;
}

// Integer codes with bf16 scales a group of 32, or E2M1 with powers of two.
PackedForm int4_form(int64_t group, FourBitCode code = FourBitCode::kInteger) {
  PackedForm form = WeightFormat::kFourBit;
  form.code = code;
  form.group_cols = group;
  form.scales = DType::kBF16;
  return form;
}

PackedMatrix random_four_bits(int64_t rows, int64_t cols, const PackedForm& form) {
  std::vector<uint8_t> codes(static_cast<size_t>(rows * cols));
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = random_bits(1, 0, i) & 15;
  const std::vector<float> scales(static_cast<size_t>(rows * cols / form.group_cols), 0x1p-8f);
  ScaledMatrix source{ConstTensorView(codes.data(), {rows, cols}),
                      ConstTensorView(scales.data(), {rows, cols / form.group_cols}), 1,
                      form.group_cols};
  source.code = form.code;
  PackedMatrix packed = *PackedMatrix::allocate(rows, cols, form, "benchmark");
  packed.pack(0, source);
  return packed;
}

PackedMatrix random_weight(int64_t rows, int64_t cols, const PackedForm& form) {
  const WeightFormat format = form.format;
  if (format == WeightFormat::kFourBit) return random_four_bits(rows, cols, form);
  const bool fp8 = format == WeightFormat::kF8E4M3;
  const DType dtype = fp8 ? DType::kF8E4M3 : DType::kBF16;
  const Buffer values = *Buffer::allocate(rows * cols * size_of(dtype), "benchmark");
  for (int64_t i = 0; i < rows * cols; ++i) {
    const auto u = static_cast<float>(random_uniform(1, 0, static_cast<uint64_t>(i)) * 2 - 1);
    if (fp8) {
      reinterpret_cast<e4m3*>(values.data())[i] = to_e4m3(u * 400);
    } else {
      reinterpret_cast<bf16*>(values.data())[i] = to_bf16(u * 0.05f);
    }
  }
  const int64_t down = (rows + 127) / 128, across = (cols + 127) / 128;
  const std::vector<float> scales(static_cast<size_t>(down * across), 1e-4f);
  ScaledMatrix source{values.view(dtype, {rows, cols}), {}, 128, 128};
  if (fp8) source.scales = ConstTensorView(scales.data(), {down, across});
  PackedMatrix packed = *PackedMatrix::allocate(rows, cols, format, "benchmark");
  packed.pack(0, source);
  return packed;
}

struct Layer {
  Layer(const Shape& shape, const PackedForm& format) {
    for (int e = 0; e <= shape.num_experts; ++e) {
      const int64_t intermediate = e == shape.num_experts ? shape.shared : shape.intermediate;
      MlpWeights weights = {random_weight(2 * intermediate, shape.hidden, format),
                            random_weight(shape.hidden, intermediate, format)};
      if (e == shape.num_experts) {
        shared = std::move(weights);
      } else {
        experts.push_back(std::move(weights));
      }
    }
  }
  static int64_t bytes(const MlpWeights& weights) {
    return weights.gate_up.bytes() + weights.down.bytes();
  }
  std::vector<MlpWeights> experts;
  MlpWeights shared;
};

// One step's routing: every token's experts at random, distinct.
std::vector<int32_t> random_routing(const Shape& shape, int64_t rows, uint64_t step) {
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < rows; ++t) {
    std::vector<std::pair<uint64_t, int32_t>> order;
    order.reserve(static_cast<size_t>(shape.num_experts));
    for (int32_t e = 0; e < shape.num_experts; ++e) {
      order.emplace_back(random_bits(step, static_cast<uint64_t>(t), static_cast<uint64_t>(e)), e);
    }
    std::sort(order.begin(), order.end());
    for (int s = 0; s < shape.per_token; ++s) ids.push_back(order[static_cast<size_t>(s)].second);
  }
  return ids;
}

void run(benchmark::State& state, const Shape& shape, const PackedForm& format, int64_t rows) {
  const double read_limit = probe_read(pool(), uncached_bytes());
  const double math_limit = probe_math(pool(), ProbeMath::kBF16);
  const Layer layer(shape, format);
  const Buffer x = *Buffer::allocate(rows * shape.hidden * 2, "benchmark");
  for (int64_t i = 0; i < rows * shape.hidden; ++i) {
    const double u = random_uniform(3, 0, static_cast<uint64_t>(i)) * 2 - 1;
    reinterpret_cast<bf16*>(x.data())[i] = to_bf16(static_cast<float>(u));
  }
  const Buffer out = *Buffer::allocate(rows * shape.hidden * 4, "benchmark");
  std::fill_n(reinterpret_cast<float*>(out.data()), rows * shape.hidden, 0.0f);
  const int64_t workspace_bytes = moe_workspace_bytes(
      rows, shape.hidden, shape.num_experts, shape.per_token, shape.intermediate, shape.shared);
  const Buffer workspace = *Buffer::allocate(workspace_bytes, "benchmark");
  // A different routing each step: a step does not find the last one's experts in the cache.
  constexpr size_t kSteps = 16;
  std::vector<std::vector<int32_t>> routings;
  double step_bytes = 0;
  for (size_t step = 0; step < kSteps; ++step) {
    routings.push_back(random_routing(shape, rows, step));
    std::vector<int32_t> used = routings.back();
    std::sort(used.begin(), used.end());
    used.erase(std::unique(used.begin(), used.end()), used.end());
    step_bytes +=
        static_cast<double>(static_cast<int64_t>(used.size()) * Layer::bytes(layer.experts[0]) +
                            Layer::bytes(layer.shared)) /
        kSteps;
  }
  const std::vector<float> weights(static_cast<size_t>(rows * shape.per_token), 0.1f);
  const Stream stream(pool());
  size_t step = 0;
  for (auto _ : state) {
    moe(stream, x.view(DType::kBF16, {rows, shape.hidden}),
        ConstTensorView(routings[step].data(), {rows, shape.per_token}),
        ConstTensorView(weights.data(), {rows, shape.per_token}), layer.experts, &layer.shared,
        out.view(DType::kF32, {rows, shape.hidden}),
        {workspace.data(), static_cast<size_t>(workspace_bytes)});
    step = (step + 1) % kSteps;
  }
  const auto iterations = static_cast<double>(state.iterations());
  const double flops =
      6.0 * static_cast<double>(rows * shape.hidden *
                                (shape.per_token * shape.intermediate + shape.shared));
  using benchmark::Counter;
  state.counters["GB/s"] = Counter(step_bytes * iterations / 1e9, Counter::kIsRate);
  state.counters["GFLOP/s"] = Counter(flops * iterations / 1e9, Counter::kIsRate);
  state.counters["read%"] = Counter(100 * step_bytes * iterations / read_limit, Counter::kIsRate);
  state.counters["math%"] = Counter(100 * flops * iterations / math_limit, Counter::kIsRate);
}

const bool registered = [] {
  for (const Shape& shape : kShapes) {
    for (const auto& [of, form] : {std::pair<const char*, PackedForm>("bf16", WeightFormat::kBF16),
                                   {"fp8", WeightFormat::kF8E4M3},
                                   {"int4_g32", int4_form(32)},
                                   {"int4_g128", int4_form(128)},
                                   {"mxfp4", int4_form(32, FourBitCode::kE2m1)}}) {
      for (const int64_t rows : {1, 16, 512}) {
        const std::string name =
            std::string(shape.name) + "/" + of + "/rows" + std::to_string(rows);
        benchmark::RegisterBenchmark(name.c_str(), [=, format = form](benchmark::State& state) {
          run(state, shape, format, rows);
        })->UseRealTime();
      }
    }
  }
  return true;
}();

}  // namespace
}  // namespace fathom
