#include "convert/symmetric_eigen.h"

#include <Eigen/Eigenvalues>
#include <algorithm>

#include "base/check.h"

namespace fathom::mla {

SymmetricEigen symmetric_eigen(const Matrix& matrix) {
  const Eigen::Index n = matrix.rows();
  FATHOM_CHECK(n == matrix.cols(), "{} x {}", n, matrix.cols());
  SymmetricEigen result{Vector(n), Matrix(n, n)};
  if (n == 0) return result;
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(matrix);
  FATHOM_CHECK(solver.info() == Eigen::Success, "no eigenvalues of {} x {}", n, n);
  for (Eigen::Index i = 0; i < n; ++i) {
    const Eigen::Index from = n - 1 - i;  // Eigen's are ascending
    result.values[i] = std::max(0.0, solver.eigenvalues()[from]);
    result.vectors.row(i) = solver.eigenvectors().col(from).transpose();
    Eigen::Index largest = 0;
    result.vectors.row(i).cwiseAbs().maxCoeff(&largest);
    if (result.vectors(i, largest) < 0) result.vectors.row(i) *= -1;
  }
  return result;
}

}  // namespace fathom::mla
