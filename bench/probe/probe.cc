#include "bench/probe/probe.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "base/random.h"
#include "bench/probe/probe_kernels.h"
#include "device/cpu/isa.h"
#include "tensor/buffer.h"

namespace fathom {
namespace {

uint64_t portable_read(const std::byte* data, int64_t bytes) {
  const auto* words = reinterpret_cast<const uint64_t*>(data);
  uint64_t sums[8] = {};
  for (int64_t i = 0; i < bytes / 8; i += 8) {
    for (int s = 0; s < 8; ++s) sums[s] ^= words[i + s];
  }
  return sums[0] ^ sums[1] ^ sums[2] ^ sums[3] ^ sums[4] ^ sums[5] ^ sums[6] ^ sums[7];
}

int64_t portable_f32(int64_t count, float* out) {
  float sums[32];
  std::fill_n(sums, 32, out[0]);
  for (int64_t i = 0; i < count; ++i) {
    for (float& sum : sums) sum = sum * 0.999f + 0.999f;
  }
  for (const float sum : sums) out[0] += sum;
  return 64;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

const ProbeKernels& probe_kernels() {
#if defined(__x86_64__)
  if (cpu_isa() == CpuIsa::kAmx) return kProbeAmx;
  if (cpu_isa() == CpuIsa::kAvx512) return kProbeAvx512;
  if (cpu_isa() == CpuIsa::kAvx2) return kProbeAvx2;
#endif
  return kProbePortable;
}

// Calls pass() until the time is over (twice at least) and returns the durations.
template <typename Pass>
std::vector<double> durations(double seconds, const Pass& pass) {
  const double end = now() + seconds;
  std::vector<double> taken;
  for (int i = 0; i < 2 || now() < end; ++i) {
    const double start = now();
    pass();
    taken.push_back(now() - start);
  }
  return taken;
}

template <typename Pass>
double shortest(double seconds, const Pass& pass) {
  return std::ranges::min(durations(seconds, pass));
}

// Where results go, so that no loop is left out.
std::atomic<uint64_t> read_result;
std::atomic<float> math_result;

}  // namespace

const ProbeKernels kProbePortable = {portable_read, portable_f32, portable_f32};

std::vector<double> probe_read_passes(ThreadPool& pool, int64_t bytes, double seconds) {
  constexpr int64_t kChunk = 1024;
  auto buffer = Buffer::allocate(bytes, "the memory probe");
  if (!buffer) return {};
  std::byte* const data = buffer->data();
  const int64_t chunks = bytes / kChunk;
  // Each thread writes what it will read; not zeros, which the kernel may map to one page.
  const auto share = [&](int thread, const auto& body) {
    const int64_t begin = chunks * thread / pool.num_threads() * kChunk;
    const int64_t end = chunks * (thread + 1) / pool.num_threads() * kChunk;
    body(data + begin, end - begin);
  };
  pool.run([&](int thread) {
    share(thread, [](std::byte* part, int64_t size) {
      auto* const words = reinterpret_cast<uint64_t*>(part);
      for (int64_t i = 0; i < size / 8; ++i) words[i] = mix64(static_cast<uint64_t>(i));
    });
  });
  // Small buffers are read several times a pass, so that the clock and the start do not count.
  const int64_t repeats = std::max<int64_t>(1, (int64_t{32} << 20) / bytes);
  std::vector<double> rates = durations(seconds, [&] {
    pool.run([&](int thread) {
      share(thread, [&](const std::byte* part, int64_t size) {
        uint64_t sum = 0;
        for (int64_t i = 0; i < repeats; ++i) sum ^= probe_kernels().read(part, size);
        read_result.store(sum, std::memory_order_relaxed);
      });
    });
  });
  for (double& rate : rates) rate = static_cast<double>(chunks * kChunk * repeats) / rate;
  return rates;
}

double probe_read(ThreadPool& pool, int64_t bytes, double seconds) {
  const std::vector<double> rates = probe_read_passes(pool, bytes, seconds);
  return rates.empty() ? 0 : std::ranges::max(rates);
}

int64_t uncached_bytes() {
  return std::max<int64_t>(256'000'000, 4 * int64_t{sysconf(_SC_LEVEL3_CACHE_SIZE)});
}

double probe_math(ThreadPool& pool, ProbeMath math, double seconds) {
  const auto kernel = math == ProbeMath::kBF16 ? probe_kernels().bf16 : probe_kernels().f32;
  constexpr int64_t kRounds = 100'000;
  int64_t operations = 0;
  const double duration = shortest(seconds, [&] {
    pool.run([&](int thread) {
      float value = 1;
      const int64_t per_round = kernel(kRounds, &value);
      math_result.store(value, std::memory_order_relaxed);
      if (thread == 0) operations = per_round * kRounds * pool.num_threads();
    });
  });
  return static_cast<double>(operations) / duration;
}

ProbeResult probe_machine(int threads) {
  ThreadPool one(1);
  ThreadPool all(threads);
  ProbeResult result;
  result.isa = name_of(cpu_isa());
  for (ThreadPool* pool : {&one, &all}) {
    if (pool == &all && all.num_threads() == 1) break;
    for (const int64_t bytes :
         {uncached_bytes(), int64_t{28'000'000}, int64_t{16'000'000}, int64_t{4'000'000}}) {
      result.reads.push_back({pool->num_threads(), bytes, probe_read(*pool, bytes)});
    }
    result.math.push_back({pool->num_threads(), probe_math(*pool, ProbeMath::kBF16),
                           probe_math(*pool, ProbeMath::kF32)});
  }
  return result;
}

std::string to_text(const ProbeResult& result) {
  std::string text = fmt::format("probe ({})\n", result.isa);
  for (const auto& read : result.reads) {
    text += fmt::format("  read {:4} MB, {} thread{}  {:7.1f} GB/s\n", read.bytes / 1'000'000,
                        read.threads, read.threads == 1 ? " " : "s", read.bytes_per_second / 1e9);
  }
  for (const auto& math : result.math) {
    text += fmt::format("  bf16 / fp32, {} thread{} {:7.1f} / {:.1f} GFLOP/s\n", math.threads,
                        math.threads == 1 ? " " : "s", math.bf16_flops / 1e9, math.f32_flops / 1e9);
  }
  return text;
}

std::string to_json(const ProbeResult& result) {
  std::string reads, math;
  for (const auto& read : result.reads) {
    reads +=
        fmt::format(R"({}{{"threads":{},"bytes":{},"gb_per_s":{:.2f}}})", reads.empty() ? "" : ",",
                    read.threads, read.bytes, read.bytes_per_second / 1e9);
  }
  for (const auto& rate : result.math) {
    math += fmt::format(R"({}{{"threads":{},"bf16_gflops":{:.1f},"f32_gflops":{:.1f}}})",
                        math.empty() ? "" : ",", rate.threads, rate.bf16_flops / 1e9,
                        rate.f32_flops / 1e9);
  }
  return fmt::format(R"({{"isa":"{}","read":[{}],"math":[{}]}})", result.isa, reads, math);
}

}  // namespace fathom
