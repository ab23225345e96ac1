#include "convert/mla_basis.h"

#include <cmath>

#include "base/check.h"
#include "convert/symmetric_eigen.h"

namespace fathom::mla {
namespace {

// Where the first value of a pair stands in a key; the second stands head_dim / 2 behind it.
int64_t first_of_pair(const MlaShape& shape, int64_t frequency, int64_t kv_head) {
  return kv_head * shape.head_dim + frequency;
}

// RoRoPE. Position turns all pairs of a frequency by one angle, so a rotation over the KV heads of
// both values of the pairs alike commutes with it; that of the eigenvectors moves most energy into
// the first components. With a fold several neighbouring frequencies are treated as one, which is
// an approximation. The first components of each fold stay rotated, with every collapse-th
// frequency.
Matrix rotate_keys(const MlaShape& shape, const Matrix& moments) {
  const int64_t half = shape.num_frequencies(), fold = shape.fold, heads = shape.kv_heads;
  const int64_t width = fold * heads;               // components of a fold
  const int64_t slots = fold / shape.collapse();    // frequencies that it keeps
  const int64_t kept = shape.rope_heads() * slots;  // components that stay rotated
  const int64_t table = shape.rope_dim / shape.rope_heads();
  Matrix keys = Matrix::Zero(shape.key_dim(), shape.key_dim());
  int64_t next_unrotated = shape.rope_dim;
  for (int64_t first = 0; first < half; first += fold) {
    const auto place = [&](int64_t c) {
      return first_of_pair(shape, first + c / heads, c % heads);
    };
    Matrix sums(width, width);
    for (int64_t i = 0; i < width; ++i) {
      for (int64_t j = 0; j < width; ++j) {
        const int64_t a = place(i), b = place(j);
        sums(i, j) = moments(a, b) + moments(a + half, b + half);
      }
    }
    const SymmetricEigen eigen = symmetric_eigen(sums);
    for (int64_t component = 0; component < width; ++component) {
      int64_t row = 0;
      if (component < kept) {
        const int64_t slot = first / shape.collapse() + component % slots;
        row = component / slots * table + 2 * slot;
      } else {
        row = next_unrotated;
        next_unrotated += 2;
      }
      for (int64_t c = 0; c < width; ++c) {
        keys(row, place(c)) = eigen.vectors(component, c);
        keys(row + 1, place(c) + half) = eigen.vectors(component, c);
      }
    }
  }
  return keys;
}

// The mean of the channels' root mean squares; 0 of no channels.
double mean_norm(const Vector& squares) {
  return squares.size() == 0 ? 0 : squares.cwiseMax(0.0).cwiseSqrt().mean();
}

double share(double part, double whole) { return whole > 0 ? part / whole : 1; }

}  // namespace

MlaBasis make_basis(const MlaShape& shape, const Matrix& moments) {
  const int64_t d = shape.key_dim(), free = shape.unrotated();
  FATHOM_CHECK(moments.rows() == 2 * d && moments.cols() == 2 * d, "{} x {} moments for {}",
               moments.rows(), moments.cols(), d);
  MlaBasis basis;
  basis.keys = rotate_keys(shape, moments);
  const auto unrotated = basis.keys.bottomRows(free);
  const Matrix rotated_moments = unrotated * moments.topLeftCorner(d, d) * unrotated.transpose();
  const Vector key_squares = rotated_moments.diagonal();
  const Vector value_squares = moments.diagonal().tail(d);
  const double keys_norm = mean_norm(key_squares), values_norm = mean_norm(value_squares);
  if (keys_norm > 0 && values_norm > 0) basis.balance = keys_norm / values_norm;

  Matrix joint(free + d, free + d);
  joint.topLeftCorner(free, free) = rotated_moments / (basis.balance * basis.balance);
  joint.topRightCorner(free, d) = unrotated * moments.topRightCorner(d, d) / basis.balance;
  joint.bottomLeftCorner(d, free) = joint.topRightCorner(free, d).transpose();
  joint.bottomRightCorner(d, d) = moments.bottomRightCorner(d, d);
  const SymmetricEigen eigen = symmetric_eigen(joint);
  basis.latent = eigen.vectors.topRows(shape.rank);
  basis.latent_energy = share(eigen.values.head(shape.rank).sum(), eigen.values.sum());
  const double all_keys = moments.diagonal().head(d).sum();
  basis.rope_energy = share(all_keys - key_squares.sum(), all_keys);
  return basis;
}

}  // namespace fathom::mla
