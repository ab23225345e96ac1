// Matrices of the conversion: double precision, row-major. Eigen is seen by this room alone.
#pragma once

#include <Eigen/Core>

namespace fathom::mla {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = Eigen::VectorXd;

}  // namespace fathom::mla
