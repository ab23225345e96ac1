#include "convert/mla_basis.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/random.h"
#include "convert/attention_weights.h"
#include "convert/symmetric_eigen.h"

namespace fathom::mla {
namespace {

Matrix random_matrix(int64_t rows, int64_t cols, uint64_t seed) {
  Matrix matrix(rows, cols);
  for (int64_t i = 0; i < matrix.size(); ++i) {
    matrix.data()[i] = random_uniform(seed, 0, static_cast<uint64_t>(i)) - 0.5;
  }
  return matrix;
}

Matrix random_moments(int64_t width, uint64_t seed) {
  const Matrix factor = random_matrix(width, width, seed);
  return factor * factor.transpose();
}

TEST(SymmetricEigen, DescendingAndOrthonormal) {
  const Matrix matrix = random_moments(40, 1);
  const SymmetricEigen eigen = symmetric_eigen(matrix);
  EXPECT_LT((eigen.vectors * eigen.vectors.transpose() - Matrix::Identity(40, 40)).norm(), 1e-12);
  const Matrix back = eigen.vectors.transpose() * eigen.values.asDiagonal() * eigen.vectors;
  EXPECT_LT((back - matrix).norm(), 1e-11);
  for (int i = 1; i < 40; ++i) EXPECT_LE(eigen.values[i], eigen.values[i - 1]);
}

// The attention of one head in double precision, from projected keys, values and queries of all
// tokens; rotation pairs (i, i + d / 2) of each head of `table` values.
struct Rope {
  int64_t table, theta;
  bool adjacent;

  void rotate(Eigen::Ref<Vector> x, int64_t position) const {
    for (int64_t head = 0; head < x.size(); head += table) {
      for (int64_t i = 0; i < table / 2; ++i) {
        const double angle = static_cast<double>(position) *
                             std::pow(static_cast<double>(theta),
                                      -2.0 * static_cast<double>(i) / static_cast<double>(table));
        double& a = x[head + (adjacent ? 2 * i : i)];
        double& b = x[head + (adjacent ? 2 * i + 1 : i + table / 2)];
        const double turned = a * std::cos(angle) - b * std::sin(angle);
        b = a * std::sin(angle) + b * std::cos(angle);
        a = turned;
      }
    }
  }
};

// Scores of the last of `tokens` inputs [tokens, hidden] with all, and values, a head at a time:
// [heads, tokens] and [heads * d, tokens].
struct Seen {
  Matrix scores, values;
};

Seen source_attention(const MlaShape& shape, const GqaAttention& w, const Matrix& x) {
  const Rope rope{shape.head_dim, 10000, false};
  const int64_t tokens = x.rows(), d = shape.head_dim, each = shape.heads / shape.kv_heads;
  Seen seen{Matrix(shape.heads, tokens), Matrix(shape.heads * d, tokens)};
  Vector q = w.q * x.row(tokens - 1).transpose() + w.q_bias;
  rope.rotate(q, tokens - 1);
  for (int64_t t = 0; t < tokens; ++t) {
    Vector k = w.k * x.row(t).transpose() + w.k_bias;
    const Vector v = w.v * x.row(t).transpose() + w.v_bias;
    rope.rotate(k, t);
    for (int64_t h = 0; h < shape.heads; ++h) {
      const int64_t kv = h / each;
      seen.scores(h, t) = q.segment(h * d, d).dot(k.segment(kv * d, d)) / std::sqrt(d);
      seen.values.block(h * d, t, d, 1) = v.segment(kv * d, d);
    }
  }
  return seen;
}

Seen latent_attention(const MlaShape& shape, const MlaAttention& w, const Matrix& x) {
  const Rope rope{shape.rope_dim / shape.rope_heads(), 10000, true};
  const int64_t tokens = x.rows(), d = shape.head_dim, wide = d + shape.rope_dim;
  Seen seen{Matrix(shape.heads, tokens), Matrix(shape.heads * d, tokens)};
  const Vector q = w.q * x.row(tokens - 1).transpose() + w.q_bias;
  for (int64_t t = 0; t < tokens; ++t) {
    Vector row = w.kv_a * x.row(t).transpose() + w.kv_a_bias;
    rope.rotate(row.tail(shape.rope_dim), t);
    const Vector kv = w.kv_b * row.head(shape.rank);
    for (int64_t h = 0; h < shape.heads; ++h) {
      Vector rotated = q.segment(h * wide + d, shape.rope_dim);
      rope.rotate(rotated, tokens - 1);
      seen.scores(h, t) = (q.segment(h * wide, d).dot(kv.segment(h * 2 * d, d)) +
                           rotated.dot(row.tail(shape.rope_dim))) /
                          std::sqrt(wide);
      seen.values.block(h * d, t, d, 1) = kv.segment(h * 2 * d + d, d);
    }
  }
  return seen;
}

GqaAttention random_attention(const MlaShape& shape, int64_t hidden) {
  const int64_t d = shape.key_dim();
  return {random_matrix(shape.heads * shape.head_dim, hidden, 1),
          random_matrix(d, hidden, 2),
          random_matrix(d, hidden, 3),
          random_matrix(shape.heads * shape.head_dim, 1, 4).col(0),
          random_matrix(d, 1, 5).col(0),
          random_matrix(d, 1, 6).col(0)};
}

// More than keys and values have components: their moments have full rank.
constexpr int64_t kHidden = 160;

struct Errors {
  double scores, values;
};

Errors errors_of(const MlaShape& shape) {
  constexpr int64_t kTokens = 30;
  const GqaAttention source = random_attention(shape, kHidden);
  const Matrix x = random_matrix(kTokens, kHidden, 7);
  const MlaBasis basis = make_basis(shape, moments_of_weights(source, Vector::Ones(kHidden)));
  const int64_t d = shape.key_dim();
  EXPECT_LT((basis.keys * basis.keys.transpose() - Matrix::Identity(d, d)).norm(), 1e-10);
  EXPECT_LT(
      (basis.latent * basis.latent.transpose() - Matrix::Identity(shape.rank, shape.rank)).norm(),
      1e-10);
  const Seen before = source_attention(shape, source, x);
  const Seen after = latent_attention(shape, convert_attention(shape, basis, source), x);
  return {(after.scores - before.scores).norm() / before.scores.norm(),
          (after.values - before.values).norm() / before.values.norm()};
}

// All keys rotated and all values in the latent: the same scores and values.
TEST(ConvertAttention, IsExactWhereNothingIsCut) {
  for (const auto& [kv_heads, d] : {std::pair<int64_t, int64_t>{1, 64}, {2, 32}, {4, 16}, {3, 6}}) {
    const MlaShape shape{.heads = 2 * kv_heads,
                         .kv_heads = kv_heads,
                         .head_dim = d,
                         .rope_dim = kv_heads * d,
                         .rank = kv_heads * d};
    ASSERT_TRUE(shape.is_lossless());
    const Errors errors = errors_of(shape);
    EXPECT_LT(errors.scores, 1e-12) << kv_heads;
    EXPECT_LT(errors.values, 1e-12) << kv_heads;
  }
}

// A cut loses the rotation of the components that are cut, and the latent what is beyond its rank;
// with the whole rank the values stay exact.
TEST(ConvertAttention, LosesWhatIsCut) {
  MlaShape shape{.heads = 8, .kv_heads = 4, .head_dim = 16, .rope_dim = 16, .rank = 112};
  ASSERT_EQ(shape.rank, shape.most_rank());
  const Errors whole = errors_of(shape);
  EXPECT_GT(whole.scores, 0.05);
  EXPECT_LT(whole.values, 1e-12);
  double last = whole.values;
  for (const int64_t rank : {96, 64, 32, 8}) {
    shape.rank = rank;
    const double error = errors_of(shape).values;
    EXPECT_GT(error, last) << rank;
    last = error;
  }
}

// A single token has no distances: a key's components in the latent meet the query as the rotated
// ones do, whatever the fold and the cut.
TEST(ConvertAttention, IsExactAtDistanceZero) {
  for (const auto& [rope, fold] :
       {std::pair<int64_t, int64_t>{16, 1}, {16, 4}, {8, 2}, {4, 8}, {32, 2}}) {
    const MlaShape shape{.heads = 8,
                         .kv_heads = 4,
                         .head_dim = 16,
                         .rope_dim = rope,
                         .rank = 128 - rope,
                         .fold = fold};
    const GqaAttention source = random_attention(shape, 48);
    const Matrix x = random_matrix(1, 48, 7);
    const MlaBasis basis = make_basis(shape, moments_of_weights(source, Vector::Ones(48)));
    const Seen before = source_attention(shape, source, x);
    const Seen after = latent_attention(shape, convert_attention(shape, basis, source), x);
    EXPECT_LT((after.scores - before.scores).norm(), 1e-12 * before.scores.norm()) << rope;
    EXPECT_LT((after.values - before.values).norm(), 1e-12 * before.values.norm()) << rope;
  }
}

// RoRoPE: all heads' keys along one direction need one rotated head.
TEST(MakeBasis, MovesTheEnergyIntoTheFirstComponents) {
  const MlaShape shape{.heads = 4, .kv_heads = 4, .head_dim = 16, .rope_dim = 16, .rank = 64};
  GqaAttention source = random_attention(shape, 48);
  const double factors[] = {1, -2, 0.5, 3};
  for (int64_t kv = 0; kv < 4; ++kv) {
    source.k.middleRows(kv * 16, 16) = factors[kv] * random_matrix(16, 48, 9);
    source.k_bias.segment(kv * 16, 16).setZero();
  }
  const MlaBasis basis = make_basis(shape, moments_of_weights(source, Vector::Ones(48)));
  EXPECT_NEAR(basis.rope_energy, 1, 1e-12);
  const Matrix x = random_matrix(20, 48, 7);
  const Seen before = source_attention(shape, source, x);
  const Seen after = latent_attention(shape, convert_attention(shape, basis, source), x);
  EXPECT_LT((after.scores - before.scores).norm(), 1e-12 * before.scores.norm());
}

// FreqFold: a rotation over several frequencies finds at least the direction that one finds, so
// the kept pairs hold more of the keys' energy. Each is a fold of what goes before.
TEST(MakeBasis, AWiderFoldKeepsMoreOfTheKeysEnergy) {
  double last = 0;
  for (const int64_t fold : {1, 2, 4, 8}) {
    const MlaShape shape{
        .heads = 4, .kv_heads = 4, .head_dim = 16, .rope_dim = 16, .rank = 64, .fold = fold};
    const GqaAttention source = random_attention(shape, 48);
    const double energy =
        make_basis(shape, moments_of_weights(source, Vector::Ones(48))).rope_energy;
    EXPECT_GT(energy, last + 0.01) << fold;
    EXPECT_LT(energy, 1) << fold;
    last = energy;
  }
}

// The keys' larger norm does not take all of the rank.
TEST(MakeBasis, BalancesKeysAndValues) {
  const MlaShape shape{.heads = 4, .kv_heads = 4, .head_dim = 16, .rope_dim = 16, .rank = 56};
  const Errors plain = errors_of(shape);
  GqaAttention source = random_attention(shape, kHidden);
  source.k *= 100;
  source.k_bias *= 100;
  const MlaBasis basis = make_basis(shape, moments_of_weights(source, Vector::Ones(kHidden)));
  EXPECT_GT(basis.balance, 50);
  const Matrix x = random_matrix(30, kHidden, 7);
  const Seen before = source_attention(shape, source, x);
  const Seen after = latent_attention(shape, convert_attention(shape, basis, source), x);
  EXPECT_NEAR((after.values - before.values).norm() / before.values.norm(), plain.values, 1e-9);
}

}  // namespace
}  // namespace fathom::mla
