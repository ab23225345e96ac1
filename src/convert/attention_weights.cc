#include "convert/attention_weights.h"

#include <cmath>

namespace fathom::mla {
namespace {

// Queries [H * head_dim, n] -> [H * (head_dim + rope_dim), n]: a head's own values, which meet the
// keys that the latent gives back, then what meets the shared rotated key. MLA divides scores by
// sqrt(head_dim + rope_dim), the source by sqrt(head_dim).
Matrix convert_queries(const MlaShape& shape, const MlaBasis& basis, const Matrix& q) {
  const int64_t d = shape.head_dim, rope = shape.rope_dim, wide = d + rope;
  const double scale = std::sqrt(static_cast<double>(wide) / static_cast<double>(d));
  Matrix converted(shape.heads * wide, q.cols());
  for (int64_t head = 0; head < shape.heads; ++head) {
    const int64_t kv_head = head / (shape.heads / shape.kv_heads);
    const auto own = q.middleRows(head * d, d);
    converted.middleRows(head * wide, d) = scale * own;
    converted.middleRows(head * wide + d, rope) =
        scale * (basis.keys.block(0, kv_head * d, rope, d) * own);
  }
  return converted;
}

// Keys and values [D, n] -> [rank + rope_dim, n]: the latent, then the rotated key.
Matrix convert_rows(const MlaShape& shape, const MlaBasis& basis, const Matrix& k,
                    const Matrix& v) {
  const int64_t free = shape.unrotated();
  Matrix joint(free + v.rows(), k.cols());
  joint.topRows(free) = basis.keys.bottomRows(free) * k / basis.balance;
  joint.bottomRows(v.rows()) = v;
  Matrix converted(shape.rank + shape.rope_dim, k.cols());
  converted.topRows(shape.rank) = basis.latent * joint;
  converted.bottomRows(shape.rope_dim) = basis.keys.topRows(shape.rope_dim) * k;
  return converted;
}

// [H * 2 * head_dim, rank]: each head's key without the rotated components, then its value.
Matrix convert_expansion(const MlaShape& shape, const MlaBasis& basis) {
  const int64_t d = shape.head_dim, free = shape.unrotated();
  Matrix expansion(shape.heads * 2 * d, shape.rank);
  for (int64_t head = 0; head < shape.heads; ++head) {
    const int64_t kv_head = head / (shape.heads / shape.kv_heads);
    expansion.middleRows(head * 2 * d, d) =
        basis.balance * (basis.keys.block(shape.rope_dim, kv_head * d, free, d).transpose() *
                         basis.latent.leftCols(free).transpose());
    expansion.middleRows(head * 2 * d + d, d) =
        basis.latent.middleCols(free + kv_head * d, d).transpose();
  }
  return expansion;
}

}  // namespace

MlaAttention convert_attention(const MlaShape& shape, const MlaBasis& basis,
                               const GqaAttention& source) {
  MlaAttention converted;
  converted.q = convert_queries(shape, basis, source.q);
  converted.kv_a = convert_rows(shape, basis, source.k, source.v);
  converted.kv_b = convert_expansion(shape, basis);
  if (source.q_bias.size() == 0) return converted;
  converted.q_bias = convert_queries(shape, basis, source.q_bias).col(0);
  converted.kv_a_bias = convert_rows(shape, basis, source.k_bias, source.v_bias).col(0);
  return converted;
}

Matrix moments_of_weights(const GqaAttention& source, const Vector& input_norm) {
  const auto d = source.k.rows();
  Matrix both(2 * d, source.k.cols());
  both.topRows(d) = source.k;
  both.bottomRows(d) = source.v;
  both = both * input_norm.asDiagonal();
  Matrix moments = both * both.transpose();
  if (source.k_bias.size() == 0) return moments;
  Vector bias(2 * d);
  bias << source.k_bias, source.v_bias;
  return moments + bias * bias.transpose();
}

}  // namespace fathom::mla
