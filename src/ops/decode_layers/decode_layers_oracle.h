// Float64 reference of decode_layers() from the definition, for tests: layers of one TP8 rank of
// DeepSeek-V3, or of DeepSeek-V2-Lite, one token, over a given latent cache. Activations are not
// rounded; weights and cache rows have their exact decoded values.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/latent_layout.h"

namespace fathom {

// What the shapes of the kernel share, and where they differ.
struct DecodeLayersOracleShape {
  static constexpr int64_t kHeads = 16, kLatent = 512, kNope = 128, kRope = 64, kV = 128;
  static constexpr double kEps = 1e-6;
  int64_t hidden = 0, q_lora = 0, inter = 0, shared_inter = 0, experts = 0, chosen = 0;
  // Groups of experts, of which `groups_per_token` are kept; scores are sigmoids, with a bias for
  // the choice, and weights are normalised. 0: softmax, weights as they are.
  int64_t groups = 0, groups_per_token = 0;
  double scaling = 1;

  static DecodeLayersOracleShape v3_tp8() { return {7168, 1536, 256, 256, 256, 8, 8, 4, 2.5}; }
  static DecodeLayersOracleShape v2_lite() { return {2048, 0, 1408, 2816, 64, 6, 0, 0, 1}; }
};

// [n, k] of dequantized e4m3 or bf16 values with scales [n / 128 rounded up, k / 128].
struct OracleMatrix {
  const float* values = nullptr;
  const float* scales = nullptr;
  int64_t k = 0;

  // Row `row` times x.
  double dot(int64_t row, const double* x) const;
};

struct OracleLayer {
  std::vector<float> input_norm, q_a_norm, kv_a_norm, post_attention_norm;
  OracleMatrix q_kv_a, q_b, uk, uv, o;  // q_b: with query compression
  std::vector<float> router;            // [experts, hidden]
  std::vector<float> router_bias;
  // Per expert: [2 * inter, hidden] and [hidden, inter]; the shared expert is last, of its own
  // width.
  std::vector<OracleMatrix> gate_up, down;
};

// A sequence in a cache of [layers, pages, 64, row bytes].
struct OracleSequence {
  LatentLayout layout;
  int64_t layer_bytes = 0;
  std::vector<int32_t> block_table;
  int32_t position = 0;  // position of the token; keys before it lie in the cache

  int64_t slot(int32_t key) const {
    return block_table[static_cast<size_t>(key / kPageSize)] * kPageSize + key % kPageSize;
  }
  int64_t row_at(int64_t layer, int32_t key) const {
    return layer * layer_bytes + slot(key) * layout.row_bytes();
  }
};

struct OracleResult {
  std::vector<double> residual, delta;       // [hidden] each; see DecodeLayersArguments
  std::vector<std::vector<std::byte>> rows;  // cache row of the token in each layer
  // The smallest margin by which an expert, or a group of experts, was chosen: of the sigmoids, or
  // of the logits before a softmax. A small margin may flip under different rounding.
  double margin = 0;
  // What W_o, and then the experts, of each layer give, without other ranks' parts.
  std::vector<std::vector<double>> parts;
};

// Before each layer's attention, rewrites cache rows before the token's so that every key matters
// to some head: head h attends to key keys[h] almost alone, if that is not negative; where
// `far_background` is set, the last head attends to the token's own. The sequence must be longer
// than every key. Stops and returns the result so far when the margin falls below `least_margin`.
struct OracleNeedles {
  std::vector<int32_t> keys;  // [heads]
  bool far_background = false;
};

// cos_sin [positions, rope / 2, 2]. Attention reads the token's own row from stored_rows [layers],
// if given, instead of the oracle's: near a tie the other side of a rounding to 8 bits is as right,
// and with few keys the difference is large. other_parts: what the other ranks' W_o and experts
// add, in the order of OracleResult::parts; none for the last layer's experts.
OracleResult run_oracle(const DecodeLayersOracleShape& shape,
                        const std::vector<OracleLayer>& layers, std::vector<double> residual,
                        const OracleSequence& sequence, const OracleNeedles& needles,
                        const std::vector<float>& cos_sin, double softmax_scale,
                        double least_margin, std::vector<std::byte>& cache,
                        const std::vector<std::vector<std::byte>>& stored_rows = {},
                        const std::vector<std::vector<double>>& other_parts = {});

}  // namespace fathom
