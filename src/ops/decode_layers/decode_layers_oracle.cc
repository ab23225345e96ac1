#include "ops/decode_layers/decode_layers_oracle.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>

#include "cache/latent_row.h"

namespace fathom {
namespace {

using Shape = DecodeLayersOracleShape;
using Vector = std::vector<double>;

// Calls body(i) for i below `count` on all cores.
template <typename Body>
void for_each(int64_t count, const Body& body) {
  const int64_t threads = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, 32);
  std::vector<std::jthread> running;
  for (int64_t t = 0; t < threads; ++t) {
    running.emplace_back([&, t] {
      for (int64_t i = t; i < count; i += threads) body(i);
    });
  }
}

Vector product(const OracleMatrix& matrix, int64_t rows, const double* x) {
  Vector out(static_cast<size_t>(rows));
  for_each(rows, [&](int64_t row) { out[static_cast<size_t>(row)] = matrix.dot(row, x); });
  return out;
}

void norm(double* x, int64_t n, const std::vector<float>& weight) {
  const double squares = std::inner_product(x, x + n, x, 0.0);
  const double scale = 1 / std::sqrt(squares / static_cast<double>(n) + Shape::kEps);
  for (int64_t i = 0; i < n; ++i) x[i] *= scale * weight[static_cast<size_t>(i)];
}

void rotate(double* x, const float* cos_sin) {
  for (int64_t i = 0; i < Shape::kRope; i += 2) {
    const double cos = cos_sin[i], sin = cos_sin[i + 1], a = x[i], b = x[i + 1];
    x[i] = a * cos - b * sin;
    x[i + 1] = a * sin + b * cos;
  }
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

struct Query {
  Vector latent;  // [latent]: through W_UK
  Vector rope;    // [rope]: rotated
};

struct Keys {
  std::vector<float> latent, rope;  // [keys, 512], [keys, 64]
};

class Attention {
 public:
  Attention(const OracleSequence& sequence, int64_t layer, double scale,
            std::vector<std::byte>& cache)
      : sequence_(sequence), layer_(layer), scale_(scale), cache_(cache) {}

  void plant(const OracleNeedles& needles, const std::vector<Query>& queries) const {
    if (needles.far_background) {
      for_each(sequence_.position, [&](int64_t key) {
        move(static_cast<int32_t>(key), queries.back().latent, -14, true);
      });
    }
    for (size_t head = 0; head < needles.keys.size(); ++head) {
      if (needles.keys[head] >= 0) move(needles.keys[head], queries[head].latent, 16, false);
    }
  }

  // [heads, latent]: each head's probability-weighted sum of the latent rows, the token's own last.
  std::vector<Vector> run(const std::vector<Query>& queries, const std::byte* own) const {
    const auto count = static_cast<size_t>(sequence_.position) + 1;
    Keys keys{std::vector<float>(count * Shape::kLatent), std::vector<float>(count * Shape::kRope)};
    for (size_t key = 0; key < count; ++key) {
      const std::byte* const row =
          key + 1 == count ? own
                           : cache_.data() + sequence_.row_at(layer_, static_cast<int32_t>(key));
      decode_row(sequence_.layout, row, keys.latent.data() + key * Shape::kLatent,
                 keys.rope.data() + key * Shape::kRope);
    }
    std::vector<Vector> out(queries.size(), Vector(Shape::kLatent, 0.0));
    for_each(std::ssize(queries), [&](int64_t head) {
      const Query& query = queries[static_cast<size_t>(head)];
      Vector scores(count);
      for (size_t key = 0; key < count; ++key) {
        const float* const latent = keys.latent.data() + key * Shape::kLatent;
        const float* const rope = keys.rope.data() + key * Shape::kRope;
        scores[key] =
            scale_ * (std::inner_product(query.latent.begin(), query.latent.end(), latent, 0.0) +
                      std::inner_product(query.rope.begin(), query.rope.end(), rope, 0.0));
      }
      const double most = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (double& score : scores) sum += score = std::exp(score - most);
      Vector& to = out[static_cast<size_t>(head)];
      for (size_t key = 0; key < count; ++key) {
        const float* const latent = keys.latent.data() + key * Shape::kLatent;
        for (size_t i = 0; i < to.size(); ++i) to[i] += scores[key] / sum * latent[i];
      }
    });
    return out;
  }

 private:
  // Sets the key's latent, or shifts it, so that this query gets this score.
  void move(int32_t key, const Vector& query, double score, bool keep) const {
    std::byte* const row = cache_.data() + sequence_.row_at(layer_, key);
    std::vector<float> latent(Shape::kLatent), rope(Shape::kRope);
    decode_row(sequence_.layout, row, latent.data(), rope.data());
    const double square = std::inner_product(query.begin(), query.end(), query.begin(), 0.0);
    for (size_t i = 0; i < latent.size(); ++i) {
      latent[i] = static_cast<float>((keep ? latent[i] : 0) + query[i] * score / (scale_ * square));
    }
    encode_row(sequence_.layout, latent.data(), rope.data(), row);
  }

  const OracleSequence& sequence_;
  const int64_t layer_;
  const double scale_;
  std::vector<std::byte>& cache_;
};

std::vector<Query> queries_of(const OracleLayer& layer, const Vector& q, const float* cos_sin) {
  std::vector<Query> queries(Shape::kHeads);
  for (int64_t head = 0; head < Shape::kHeads; ++head) {
    const double* const from = q.data() + head * (Shape::kNope + Shape::kRope);
    Query& query = queries[static_cast<size_t>(head)];
    query.rope.assign(from + Shape::kNope, from + Shape::kNope + Shape::kRope);
    rotate(query.rope.data(), cos_sin);
    for (int64_t i = 0; i < Shape::kLatent; ++i) {
      query.latent.push_back(layer.uk.dot(head * Shape::kLatent + i, from));
    }
  }
  return queries;
}

std::vector<std::byte> cache_row(const OracleLayer& layer, const LatentLayout& layout,
                                 const double* kv_a, const float* cos_sin) {
  Vector latent(kv_a, kv_a + Shape::kLatent);
  Vector rope(kv_a + Shape::kLatent, kv_a + Shape::kLatent + Shape::kRope);
  norm(latent.data(), Shape::kLatent, layer.kv_a_norm);
  rotate(rope.data(), cos_sin);
  const std::vector<float> narrow_latent(latent.begin(), latent.end()),
      narrow_rope(rope.begin(), rope.end());
  std::vector<std::byte> row(static_cast<size_t>(layout.row_bytes()));
  encode_row(layout, narrow_latent.data(), narrow_rope.data(), row.data());
  return row;
}

Vector mlp(const OracleMatrix& gate_up, const OracleMatrix& down, const Vector& x) {
  const Vector both = product(gate_up, 2 * down.k, x.data());
  Vector inner(static_cast<size_t>(down.k));
  for (size_t i = 0; i < inner.size(); ++i) {
    inner[i] = both[i] * sigmoid(both[i]) * both[i + inner.size()];
  }
  return product(down, gate_up.k, inner.data());
}

// The indices of the `count` largest values; margin becomes at most the distance to the next one.
std::vector<int64_t> largest(const Vector& values, int64_t count, double& margin) {
  std::vector<int64_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  const auto at = [&](int64_t i) { return values[static_cast<size_t>(i)]; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return at(a) > at(b); });
  margin = std::min(
      margin, at(order[static_cast<size_t>(count) - 1]) - at(order[static_cast<size_t>(count)]));
  order.resize(static_cast<size_t>(count));
  return order;
}

struct Choice {
  std::vector<int64_t> experts;
  Vector weights;
};

// V3's rules: sigmoids, groups, a bias for the choice.
Choice choose_in_groups(const Shape& shape, const OracleLayer& layer, const Vector& logits,
                        double& margin) {
  const int64_t size = shape.experts / shape.groups;
  Vector scores, choice;
  for (size_t i = 0; i < logits.size(); ++i) {
    scores.push_back(sigmoid(logits[i]));
    choice.push_back(scores[i] + layer.router_bias[i]);
  }
  Vector groups;
  for (int64_t g = 0; g < shape.groups; ++g) {
    Vector members(choice.begin() + g * size, choice.begin() + (g + 1) * size);
    std::partial_sort(members.begin(), members.begin() + 2, members.end(), std::greater<>());
    groups.push_back(members[0] + members[1]);
  }
  Vector left(choice.size(), -1e9);
  for (const int64_t g : largest(groups, shape.groups_per_token, margin)) {
    std::copy_n(choice.begin() + g * size, size, left.begin() + g * size);
  }
  Choice chosen{largest(left, shape.chosen, margin), {}};
  double sum = 0;
  for (const int64_t e : chosen.experts) sum += scores[static_cast<size_t>(e)];
  for (const int64_t e : chosen.experts) {
    chosen.weights.push_back(shape.scaling * scores[static_cast<size_t>(e)] / sum);
  }
  return chosen;
}

// V2's: a softmax over all experts.
Choice choose_by_softmax(const Shape& shape, const Vector& logits, double& margin) {
  Choice chosen{largest(logits, shape.chosen, margin), {}};
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit);
  for (const int64_t e : chosen.experts) {
    chosen.weights.push_back(shape.scaling * std::exp(logits[static_cast<size_t>(e)]) / sum);
  }
  return chosen;
}

Vector experts(const Shape& shape, const OracleLayer& layer, const Vector& x, double& margin) {
  Vector logits(static_cast<size_t>(shape.experts));
  for_each(shape.experts, [&](int64_t e) {
    logits[static_cast<size_t>(e)] =
        std::inner_product(x.begin(), x.end(), layer.router.begin() + e * shape.hidden, 0.0);
  });
  const Choice chosen = shape.groups > 0 ? choose_in_groups(shape, layer, logits, margin)
                                         : choose_by_softmax(shape, logits, margin);
  Vector out = mlp(layer.gate_up.back(), layer.down.back(), x);
  for (size_t i = 0; i < chosen.experts.size(); ++i) {
    const auto e = static_cast<size_t>(chosen.experts[i]);
    const Vector one = mlp(layer.gate_up[e], layer.down[e], x);
    for (size_t c = 0; c < out.size(); ++c) out[c] += chosen.weights[i] * one[c];
  }
  return out;
}

}  // namespace

double OracleMatrix::dot(int64_t row, const double* x) const {
  constexpr int64_t kBlock = 128;
  const float* const w = values + row * k;
  const float* const scale = scales + row / kBlock * (k / kBlock);
  double sum = 0;
  for (int64_t first = 0; first < k; first += kBlock) {
    double four[4] = {};  // independent sums
    for (int64_t i = first; i < first + kBlock; i += 4) {
      for (int64_t j = 0; j < 4; ++j) four[j] += w[i + j] * x[i + j];
    }
    sum += (four[0] + four[1] + four[2] + four[3]) * scale[first / kBlock];
  }
  return sum;
}

OracleResult run_oracle(const DecodeLayersOracleShape& shape,
                        const std::vector<OracleLayer>& layers, std::vector<double> residual,
                        const OracleSequence& sequence, const OracleNeedles& needles,
                        const std::vector<float>& cos_sin, double softmax_scale,
                        double least_margin, std::vector<std::byte>& cache,
                        const std::vector<std::vector<std::byte>>& stored_rows,
                        const std::vector<std::vector<double>>& other_parts) {
  const float* const turns = cos_sin.data() + int64_t{sequence.position} * Shape::kRope;
  OracleResult result;
  result.margin = 1e9;
  result.delta.assign(residual.size(), 0);
  const auto add_delta = [&] {
    for (size_t i = 0; i < residual.size(); ++i) residual[i] += result.delta[i];
  };
  const auto set_delta = [&](Vector part) {
    result.parts.push_back(std::move(part));
    result.delta = result.parts.back();
    if (result.parts.size() > other_parts.size()) return;
    const Vector& other = other_parts[result.parts.size() - 1];
    for (size_t i = 0; i < other.size(); ++i) result.delta[i] += other[i];
  };
  for (size_t l = 0; l < layers.size(); ++l) {
    const OracleLayer& layer = layers[l];
    add_delta();
    Vector x = residual;
    norm(x.data(), shape.hidden, layer.input_norm);
    const int64_t q_rows = Shape::kHeads * (Shape::kNope + Shape::kRope),
                  key_at = shape.q_lora > 0 ? shape.q_lora : q_rows;
    Vector qkv = product(layer.q_kv_a, key_at + Shape::kLatent + Shape::kRope, x.data());
    Vector q = qkv;
    if (shape.q_lora > 0) {
      norm(qkv.data(), shape.q_lora, layer.q_a_norm);
      q = product(layer.q_b, q_rows, qkv.data());
    }
    const std::vector<Query> queries = queries_of(layer, q, turns);
    result.rows.push_back(cache_row(layer, sequence.layout, qkv.data() + key_at, turns));
    const Attention attention(sequence, static_cast<int64_t>(l), softmax_scale, cache);
    attention.plant(needles, queries);
    Vector heads;
    const std::vector<std::byte>& own = stored_rows.empty() ? result.rows.back() : stored_rows[l];
    const std::vector<Vector> attended = attention.run(queries, own.data());
    for (int64_t head = 0; head < Shape::kHeads; ++head) {
      for (int64_t v = 0; v < Shape::kV; ++v) {
        heads.push_back(
            layer.uv.dot(head * Shape::kV + v, attended[static_cast<size_t>(head)].data()));
      }
    }
    set_delta(product(layer.o, shape.hidden, heads.data()));
    add_delta();
    x = residual;
    norm(x.data(), shape.hidden, layer.post_attention_norm);
    set_delta(experts(shape, layer, x, result.margin));
    if (result.margin < least_margin) break;
  }
  result.residual = residual;
  return result;
}

}  // namespace fathom
