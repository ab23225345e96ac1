// Measures the current speed of this machine's memory and matrix units, as a reference for other
// measurements.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/json.h"
#include "tensor/dtype.h"

namespace fathom {

struct MachineProbe {
  int64_t read_bytes = 0;     // buffer that is read repeatedly: as large as a decode step's reads
  double read_bandwidth = 0;  // bytes/s with all threads; on a GPU bytes read and written by a copy
  double matrix_flops = 0;    // flop/s of GEMMs in the model's type, with all threads

  std::string line() const;  // "Probe:    …" with a line end
  void add_to(json::object& object) const;
};

// Measures the CPU's threads or the given GPU. Takes 0.2 s; the engine must be idle. All zero if
// the GPU has too little free memory.
MachineProbe measure_machine(std::optional<int> gpu, int num_threads, double read_bytes,
                             DType compute);

}  // namespace fathom
