// Eigenvalues and eigenvectors of a symmetric matrix.
#pragma once

#include "convert/matrix.h"

namespace fathom::mla {

struct SymmetricEigen {
  Vector values;   // [n], descending; never negative: those of a moment matrix
  Matrix vectors;  // [n, n]: row i belongs to value i; orthonormal, with its largest entry positive
};

// `matrix` [n, n] is symmetric and positive semidefinite up to rounding. O(n^3): n = 2,000 takes
// about a minute of one core.
SymmetricEigen symmetric_eigen(const Matrix& matrix);

}  // namespace fathom::mla
