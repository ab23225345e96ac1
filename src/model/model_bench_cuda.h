// Shared by the benchmarks of whole steps on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cache/latent_layout.h"
#include "checkpoint/checkpoint.h"
#include "device/cuda/device_array.h"

namespace fathom::cuda {

// Returns so many pages of random rows, a repetition of some 257 pages.
DeviceArray<std::byte> random_cache(const LatentLayout& layout, int64_t pages);

// NAME [MODEL] [--json]: runs with the shape of MODEL, config.json's folder (`model` without one).
// Returns main's status: 2 if MODEL does not exist, else what `run` returns.
int model_bench_main(int argc, char** argv, std::string model,
                     int (*run)(const Checkpoint& checkpoint, bool json));

}  // namespace fathom::cuda
