// Speed of the GEMMs. Each line states the bytes of weights moved or the operations done, and its
// share of the rate that the probe reaches in the same process.
//
// Shapes "cold" rotate over copies that together exceed the L3 cache, so that weights come from
// memory; "warm" ones stay in it. Run with two columns: --benchmark_counters_tabular=true.
#include <benchmark/benchmark.h>

#include <algorithm>

#include "base/random.h"
#include "bench/probe/probe.h"
#include "ops/linear/linear.h"
#include "tensor/buffer.h"

namespace fathom {
namespace {

struct Shape {
  const char* name;
  int64_t n, k;
};
const Shape kV2Lite[] = {
    {"v2lite_q", 3072, 2048},      {"v2lite_kv_a", 576, 2048},     {"v2lite_kv_b", 4096, 512},
    {"v2lite_o", 2048, 2048},      {"v2lite_gate_up", 2816, 2048}, {"v2lite_down", 2048, 1408},
    {"v2lite_dense", 21888, 2048}, {"v2lite_vocab", 102400, 2048},
};
const Shape kTiny[] = {{"tiny_q_a", 128, 256},    {"tiny_q_b", 768, 128},
                       {"tiny_w_uk", 512, 128},   {"tiny_o", 256, 512},
                       {"tiny_dense", 1536, 256}, {"tiny_vocab", 8192, 256}};

ThreadPool& pool() {
  static ThreadPool all(0);
  return all;
}

struct Limits {
  double read = probe_read(pool(), uncached_bytes());
  double bf16 = probe_math(pool(), ProbeMath::kBF16);
  double f32 = probe_math(pool(), ProbeMath::kF32);
};

PackedMatrix random_weight(const Shape& shape, WeightFormat format, uint64_t seed) {
  const bool fp8 = format == WeightFormat::kF8E4M3;
  const DType dtype = fp8 ? DType::kF8E4M3 : DType::kBF16;
  Buffer values = *Buffer::allocate(shape.n * shape.k * size_of(dtype), "benchmark");
  for (int64_t i = 0; i < shape.n * shape.k; ++i) {
    const auto u = static_cast<float>(random_uniform(seed, 0, static_cast<uint64_t>(i)) * 2 - 1);
    if (fp8) {
      reinterpret_cast<e4m3*>(values.data())[i] = to_e4m3(u * 400);
    } else {
      reinterpret_cast<bf16*>(values.data())[i] = to_bf16(u);
    }
  }
  std::vector<float> scales(static_cast<size_t>((shape.n + 127) / 128 * ((shape.k + 127) / 128)),
                            0.003f);
  ScaledMatrix source{values.view(dtype, {shape.n, shape.k}), {}, 0, 0};
  if (fp8) {
    source.scales = ConstTensorView(scales.data(), {(shape.n + 127) / 128, (shape.k + 127) / 128});
    source.scale_rows = source.scale_cols = 128;
  }
  PackedMatrix packed = *PackedMatrix::allocate(shape.n, shape.k, format, "benchmark");
  packed.pack(0, source);
  return packed;
}

Buffer random_x(int64_t rows, int64_t k, DType dtype) {
  Buffer x = *Buffer::allocate(rows * k * size_of(dtype), "benchmark");
  for (int64_t i = 0; i < rows * k; ++i) {
    const auto u = static_cast<float>(random_uniform(7, 0, static_cast<uint64_t>(i)) * 2 - 1);
    if (dtype == DType::kF32) {
      reinterpret_cast<float*>(x.data())[i] = u;
    } else {
      reinterpret_cast<bf16*>(x.data())[i] = to_bf16(u);
    }
  }
  return x;
}

void run(benchmark::State& state, const Shape& shape, WeightFormat format, DType dtype,
         int64_t rows, bool cold) {
  const Limits limits;
  std::vector<PackedMatrix> copies;
  copies.push_back(random_weight(shape, format, 1));
  const int64_t bytes = copies[0].bytes();
  for (int64_t total = bytes; cold && total < 160'000'000; total += bytes) {
    copies.push_back(random_weight(shape, format, 1 + copies.size()));
  }
  const Buffer x = random_x(rows, shape.k, dtype);
  const Buffer out = *Buffer::allocate(rows * shape.n * 4, "benchmark");
  const Stream stream(pool());
  const ConstTensorView x_view = x.view(dtype, {rows, shape.k});
  const TensorView out_view = out.view(DType::kF32, {rows, shape.n});
  size_t next = 0;
  for (auto _ : state) {
    linear(stream, x_view, copies[next], out_view);
    next = next + 1 < copies.size() ? next + 1 : 0;
  }
  const auto iterations = static_cast<double>(state.iterations());
  const double moved = static_cast<double>(bytes) * iterations;
  const double flops = 2.0 * static_cast<double>(rows * shape.n * shape.k) * iterations;
  const double peak = dtype == DType::kF32 ? limits.f32 : limits.bf16;
  using benchmark::Counter;
  state.counters["GB/s"] = Counter(moved / 1e9, Counter::kIsRate);
  state.counters["GFLOP/s"] = Counter(flops / 1e9, Counter::kIsRate);
  state.counters["read%"] = Counter(100 * moved / limits.read, Counter::kIsRate);
  state.counters["math%"] = Counter(100 * flops / peak, Counter::kIsRate);
  state.counters["probeGB/s"] = limits.read / 1e9;
}

void add(const Shape& shape, WeightFormat format, DType dtype, int64_t rows, bool cold) {
  const char* formats[] = {"f32", "bf16", "fp8"};
  const std::string name = std::string(shape.name) + "/" + formats[static_cast<int>(format)] +
                           (dtype == DType::kF32 ? "/x_f32" : "") + "/rows" + std::to_string(rows) +
                           (cold ? "/cold" : "/warm");
  benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
    run(state, shape, format, dtype, rows, cold);
  })->UseRealTime();
}

const bool registered = [] {
  for (const WeightFormat format : {WeightFormat::kBF16, WeightFormat::kF8E4M3}) {
    for (const Shape& shape : kV2Lite) {
      for (const int64_t rows : {1, 4, 16}) add(shape, format, DType::kBF16, rows, true);
      if (shape.n < 20000) add(shape, format, DType::kBF16, 512, false);
    }
    for (const Shape& shape : kTiny) {
      for (const int64_t rows : {1, 16, 512}) add(shape, format, DType::kBF16, rows, false);
    }
    add(kV2Lite[4], format, DType::kF32, 1, true);
    add(kV2Lite[4], format, DType::kF32, 512, false);
  }
  return true;
}();

// Bytes of the source that one thread packs a second: packing must not slow down loading.
void BM_Pack(benchmark::State& state) {
  const auto format = static_cast<WeightFormat>(state.range(0));
  const DType dtype = format == WeightFormat::kF8E4M3 ? DType::kF8E4M3 : DType::kBF16;
  constexpr int64_t kRows = 2048, kCols = 7168;
  Buffer values = *Buffer::allocate(kRows * kCols * size_of(dtype), "benchmark");
  for (int64_t i = 0; i < values.size(); ++i) {
    values.data()[i] = static_cast<std::byte>(random_bits(1, 2, static_cast<uint64_t>(i)));
  }
  const std::vector<float> scales(size_t{16} * 56, 0.5f);
  ScaledMatrix source{values.view(dtype, {kRows, kCols}), {}, 128, 128};
  if (dtype == DType::kF8E4M3) source.scales = ConstTensorView(scales.data(), {16, 56});
  PackedMatrix packed = *PackedMatrix::allocate(kRows, kCols, format, "benchmark");
  for (auto _ : state) packed.pack(0, source);
  state.SetBytesProcessed(state.iterations() * values.size());
}
BENCHMARK(BM_Pack)
    ->Arg(static_cast<int>(WeightFormat::kF32))
    ->Arg(static_cast<int>(WeightFormat::kBF16))
    ->Arg(static_cast<int>(WeightFormat::kF8E4M3));

}  // namespace
}  // namespace fathom
