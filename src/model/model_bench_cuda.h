// What the benchmarks of whole steps on a GPU share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cache/latent_layout.h"
#include "checkpoint/checkpoint.h"
#include "device/cuda/device_array.h"

namespace fathom::cuda {

// So many pages of random rows; some 257 of them, again and again.
DeviceArray<std::byte> random_cache(const LatentLayout& layout, int64_t pages);

// NAME [MODEL] [--json]: runs with the shape of MODEL, config.json's folder (`model` without one).
// Returns main's status: 2 where there is no such model, else what `run` returns.
int model_bench_main(int argc, char** argv, std::string model,
                     int (*run)(const Checkpoint& checkpoint, bool json));

}  // namespace fathom::cuda
