// What this machine's memory and matrix units do at this minute, to hold a measurement against.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/json.h"
#include "tensor/dtype.h"

namespace fathom {

struct MachineProbe {
  int64_t read_bytes = 0;     // that were read again and again: as many as a decode step reads
  double read_bandwidth = 0;  // bytes/s, all threads; of a GPU what a copy reads and writes
  double matrix_flops = 0;    // flop/s of products of the model's type, all threads

  std::string line() const;  // "Probe:    …", ended
  void add_to(json::object& object) const;
};

// Measures the CPU's threads or the given GPU. Takes a fifth of a second, while the engine is idle.
// All zero where the GPU has no memory left for it.
MachineProbe measure_machine(std::optional<int> gpu, int num_threads, double read_bytes,
                             DType compute);

}  // namespace fathom
