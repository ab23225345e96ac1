// What the benchmarks of whole steps on a GPU share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "checkpoint/checkpoint.h"
#include "device/cuda/device_array.h"

namespace fathom::cuda {

// Bytes of a cache, bf16 values that no product makes large.
DeviceArray<std::byte> random_cache(int64_t bytes);

// NAME [MODEL] [--json]: runs with MODEL's shape (config.json's folder, bench/models/v2-lite
// without one). Returns main's status: 2 where there is no such model, else what `run` returns.
int model_bench_main(int argc, char** argv, int (*run)(const Checkpoint& checkpoint, bool json));

}  // namespace fathom::cuda
