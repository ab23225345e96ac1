// out[i] = table[ids[i]]: rows of the embedding matrix.
#pragma once

#include <span>

#include "device/stream.h"
#include "tensor/tensor_view.h"

namespace fathom {

// table [vocab, n] f32 or bf16; out [ids, n] f32. Every id must be in [0, vocab).
void embedding(const Stream& stream, std::span<const int32_t> ids, ConstTensorView table,
               TensorView out);

}  // namespace fathom
