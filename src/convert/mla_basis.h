// The rotations that make latent attention of one layer's grouped-query attention. Source: TransMLA
// (Meng et al. 2025, arXiv 2502.07864): RoRoPE, FreqFold, balanced joint PCA.
//
// D = KV heads * head_dim. Keys k [D] are those of all KV heads beside one another, before rotation
// by position, in Llama's order: of a head of d values, i and i + d / 2 are a pair.
#pragma once

#include "convert/matrix.h"
#include "convert/mla_shape.h"

namespace fathom::mla {

struct MlaBasis {
  // [D, D], orthonormal: first the rope_dim components of a key that keep their rotation, adjacent
  // ones a pair, then those that lose it.
  Matrix keys;
  // Unrotated components are divided by it before the PCA: without it the keys' larger norm would
  // take all of the rank.
  double balance = 1;
  // [rank, unrotated + D], orthonormal: takes [unrotated keys / balance ; values] to the latent.
  Matrix latent;
  // Shares of the second moments: of the keys' components that keep their rotation, and of what
  // goes into the latent.
  double rope_energy = 1, latent_energy = 1;
};

// moments [2 * D, 2 * D]: the mean of y * y^T over tokens, y = [k ; v].
MlaBasis make_basis(const MlaShape& shape, const Matrix& moments);

}  // namespace fathom::mla
