#include "cli/machine_probe.h"

#include <algorithm>

#include "bench/probe/probe.h"
#include "engine/gpu_runner.h"

namespace fathom {

std::string MachineProbe::line() const {
  return fmt::format("Probe:    reads {:.1f} MB at {:.1f} GB/s, multiplies at {:.0f} GFLOP/s\n",
                     static_cast<double>(read_bytes) / 1e6, read_bandwidth / 1e9,
                     matrix_flops / 1e9);
}

void MachineProbe::add_to(json::object& object) const {
  object["probe_read_bytes"] = read_bytes;
  object["probe_read_bandwidth"] = read_bandwidth;
  object["probe_matrix_flops"] = matrix_flops;
}

MachineProbe measure_machine(std::optional<int> gpu, int num_threads, double read_bytes,
                             DType compute) {
  if (gpu) {
    const auto rates = measure_gpu(*gpu);
    if (!rates) return {};
    return {int64_t{1} << 30, rates->copy_bandwidth, rates->matrix_flops};
  }
  // Above 256 MB caches no longer help and the rate is constant; below 1 MB the clock is too
  // coarse.
  const auto bytes = static_cast<int64_t>(std::clamp(read_bytes, 1e6, 256e6));
  ThreadPool pool(num_threads);
  const ProbeMath math = compute == DType::kF32 ? ProbeMath::kF32 : ProbeMath::kBF16;
  return {bytes, probe_read(pool, bytes), probe_math(pool, math)};
}

}  // namespace fathom
