// The model's activations: planned for the largest step and allocated once.
//
// Every buffer is for max_rows tokens and the rank's part of the model; H are its heads. "Operand"
// is the GEMMs' input type: bf16, or f32 when the model computes in float32. The residual stream
// and all sums are f32 in either case.
#pragma once

#include <cstddef>
#include <span>

#include "model/attention_plan.h"
#include "model/model_spec.h"
#include "tensor/buffer.h"

namespace fathom {

inline std::span<std::byte> bytes_of(const Buffer& buffer) {
  return {buffer.data(), static_cast<size_t>(buffer.size())};
}

struct Workspace {
  static Result<Workspace> allocate(const ModelSpec& spec, DType operand, int64_t max_rows,
                                    const AttentionPolicy& policy, int num_threads);

  int64_t bytes() const;

  DType operand = DType::kBF16;
  Buffer residual;    // [rows, hidden] f32
  Buffer normed;      // [rows, hidden] operand
  Buffer normed_f32;  // [rows, hidden] f32: the router's input, when operand is bf16
  Buffer partial;     // [rows, hidden] f32: what the lane's ranks still have to sum; tp > 1 only
  // With MTP layers only.
  Buffer hidden;      // [rows, hidden] operand: the main model's states, after the final norm
  Buffer mtp_hidden;  // [rows, hidden] operand: what an MTP layer's rows take in; then scratch
  Buffer mtp_state;   // [MTP layers, rows, hidden] operand: their own states of their last rows
  // Attention.
  Buffer q_a;         // [rows, q_lora] f32
  Buffer q_a_normed;  // [rows, q_lora] operand
  Buffer kv_a;        // [rows, latent + rope] f32
  Buffer q;           // [rows, H, nope + rope] f32
  Buffer q_nope;      // [rows, H, nope] operand
  Buffer q_rope;      // [rows, H, rope] operand
  Buffer heads_out;   // [rows, H, v] operand: o_proj's input
  // The indexer; with sparse attention only. Hi are its heads.
  Buffer index_k;             // [rows, index dim] f32
  Buffer index_q;             // [rows, Hi, index dim] f32
  Buffer index_queries;       // [rows, Hi, index dim] in the type that goes with the keys' format
  Buffer index_head_weights;  // [rows, Hi] f32
  Buffer index_weights;       // [rows, Hi] f32: with the queries' scales
  Buffer index_scores;        // [rows of a pass, keys] f32
  Buffer key_lists;           // [rows, topk] i32: the keys that rows have chosen
  Buffer indexer;             // scratch of the operations
  // Absorbed attention, a group at a time.
  Buffer q_latent;  // [group rows, H, latent] operand
  Buffer o_latent;  // [group rows, H, latent] operand
  Buffer absorbed;  // scratch of the operation, or of sparse attention
  // Multi-head attention, a chunk of keys at a time.
  Buffer latent;     // [chunk, latent] operand
  Buffer k_rope;     // [chunk, rope] operand
  Buffer kv;         // [chunk, H, nope + v] operand
  Buffer part;       // [rows, H, v] f32
  Buffer part_lse;   // [rows, H] f32
  Buffer whole;      // [rows, H, v] f32
  Buffer whole_lse;  // [rows, H] f32
  Buffer mha;        // scratch of the operation
  // Feed-forward.
  Buffer router_logits;   // [rows, experts] f32
  Buffer expert_ids;      // [rows, k] i32
  Buffer expert_weights;  // [rows, k] f32
  Buffer mlp;             // scratch of the operations
};

}  // namespace fathom
