// The CPU form of embedding.
#pragma once

#include <span>

#include "device/cpu/thread_pool.h"
#include "tensor/tensor_view.h"

namespace fathom::cpu {

void embedding(ThreadPool& pool, std::span<const int32_t> ids, ConstTensorView table,
               TensorView out);

}  // namespace fathom::cpu
