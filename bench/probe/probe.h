// What this machine can do at best: how fast its threads read memory and how fast they multiply.
// Every speed that Fathom reports on a CPU is quoted beside these, measured in the same minute,
// because the memory of virtual machines changes its speed from one minute to the next.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/cpu/thread_pool.h"

namespace fathom {

// Bytes per second at which all threads of the pool together read `bytes` of memory, each its own
// contiguous part, again and again: the best of the passes within `seconds`.
double probe_read(ThreadPool& pool, int64_t bytes, double seconds = 0.15);

// The same of each pass, in the order of passes, at least two; none if the memory is not there.
std::vector<double> probe_read_passes(ThreadPool& pool, int64_t bytes, double seconds);

// So many bytes that a pass is read from memory: four times the last-level cache, at least 256 MB.
int64_t uncached_bytes();

enum class ProbeMath {
  kBF16,  // bf16 dot products summed in fp32; fp32 multiply-adds where the CPU has none
  kF32,   // fp32 multiply-adds
};

// Floating-point operations per second (a multiply-add is two) from registers alone.
double probe_math(ThreadPool& pool, ProbeMath math, double seconds = 0.05);

struct ProbeResult {
  struct Read {
    int threads;
    int64_t bytes;
    double bytes_per_second;
  };
  struct Math {
    int threads;
    double bf16_flops;
    double f32_flops;
  };
  std::string isa;
  std::vector<Read> reads;  // uncached_bytes(), 28, 16 and 4 MB
  std::vector<Math> math;
};

// One thread and `threads` (0: all cores). About two seconds.
ProbeResult probe_machine(int threads);

std::string to_text(const ProbeResult& result);
std::string to_json(const ProbeResult& result);

}  // namespace fathom
