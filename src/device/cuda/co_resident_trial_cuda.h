// A kernel of grid-wide barriers, for the tests of co_resident.h.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"

namespace fathom::cuda {

// Launches `blocks` CTAs, each alone on its SM, that pass `barriers` grid-wide barriers. `arrived`
// is one word of device memory, zero before the first launch: it counts CTAs at all barriers so
// far.
void launch_barriers(int blocks, int sms, uint64_t* arrived, int barriers, GpuStream stream);

// Launches an empty kernel as one whose CTAs wait for one another.
void launch_nothing(GpuStream stream);

// Raises the dynamic shared memory that launch_nothing()'s kernel may have to `bytes`; returns the
// limit as read back.
int allow_nothing(int bytes);

}  // namespace fathom::cuda
