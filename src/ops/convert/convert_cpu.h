// The CPU form of convert.
#pragma once

#include "device/cpu/thread_pool.h"
#include "tensor/tensor_view.h"

namespace fathom::cpu {

void convert(ThreadPool& pool, ConstTensorView x, TensorView out);

}  // namespace fathom::cpu
