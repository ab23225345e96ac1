// One layer's projections in either form, and how one becomes the other.
#pragma once

#include "convert/matrix.h"
#include "convert/mla_basis.h"

namespace fathom::mla {

// H query heads, D = KV heads * head_dim. Biases are empty where the model has none.
struct GqaAttention {
  Matrix q;               // [H * head_dim, hidden]
  Matrix k, v;            // [D, hidden]
  Vector q_bias;          // [H * head_dim]
  Vector k_bias, v_bias;  // [D]
};

struct MlaAttention {
  Matrix q;          // [H * (head_dim + rope_dim), hidden]
  Matrix kv_a;       // [rank + rope_dim, hidden]
  Matrix kv_b;       // [H * 2 * head_dim, rank]
  Vector q_bias;     // [H * (head_dim + rope_dim)]
  Vector kv_a_bias;  // [rank + rope_dim]
};

MlaAttention convert_attention(const MlaShape& shape, const MlaBasis& basis,
                               const GqaAttention& source);

// The moments of keys and values, [2 * D, 2 * D], for inputs whose components are independent and
// of unit size before the input norm's weight [hidden]: what can be said without a calibration
// text.
Matrix moments_of_weights(const GqaAttention& source, const Vector& input_norm);

}  // namespace fathom::mla
