#include "model/workspace.h"

#include <algorithm>

#include "base/math.h"
#include "ops/attention/attention.h"
#include "ops/moe/moe.h"

namespace fathom {

Result<Workspace> Workspace::allocate(const ModelConfig& config, DType operand, int64_t max_rows,
                                      const AttentionPolicy& policy, int num_threads) {
  Workspace w;
  w.operand = operand;
  const int64_t rows = max_rows, heads = config.num_heads, hidden = config.hidden;
  const int64_t latent = config.kv_lora_rank, rope = config.qk_rope_dim;
  const int64_t group = std::min(rows, policy.max_absorbed_rows);
  const int64_t chunk = policy.mha_key_chunk;
  const int64_t op = size_of(operand);
  const int64_t shared = config.num_shared_experts * config.moe_intermediate;
  const int64_t moe =
      config.num_experts == 0
          ? 0
          : moe_workspace_bytes(rows, hidden, config.num_experts, config.experts_per_token,
                                config.moe_intermediate, shared);
  const std::pair<Buffer*, int64_t> sizes[] = {
      {&w.residual, rows * hidden * 4},
      {&w.normed, rows * hidden * op},
      {&w.normed_f32, operand == DType::kF32 ? 0 : rows * hidden * 4},
      {&w.q_a, rows * config.q_lora_rank * 4},
      {&w.q_a_normed, rows * config.q_lora_rank * op},
      {&w.kv_a, rows * (latent + rope) * 4},
      {&w.q, rows * heads * config.qk_dim() * 4},
      {&w.q_nope, rows * heads * config.qk_nope_dim * op},
      {&w.q_rope, rows * heads * rope * op},
      {&w.heads_out, rows * heads * config.v_dim * op},
      {&w.q_latent, group * heads * latent * op},
      {&w.o_latent, group * heads * latent * op},
      {&w.absorbed, absorbed_attention_workspace_bytes(group, heads, latent, num_threads, rope)},
      {&w.latent, chunk * latent * op},
      {&w.k_rope, chunk * rope * op},
      {&w.kv, chunk * heads * (config.qk_nope_dim + config.v_dim) * op},
      {&w.part, rows * heads * config.v_dim * 4},
      {&w.part_lse, rows * heads * 4},
      {&w.whole, rows * heads * config.v_dim * 4},
      {&w.whole_lse, rows * heads * 4},
      {&w.mha, mha_attention_workspace_bytes(heads, config.qk_dim(), config.v_dim, num_threads)},
      {&w.router_logits, rows * config.num_experts * 4},
      {&w.expert_ids, rows * config.experts_per_token * 4},
      {&w.expert_weights, rows * config.experts_per_token * 4},
      {&w.mlp, std::max(moe, mlp_workspace_bytes(rows, hidden, config.intermediate))},
  };
  for (const auto& [buffer, bytes] : sizes) {
    FATHOM_TRY(*buffer, Buffer::allocate(bytes, "activations (--max-num-batched-tokens)"));
  }
  return w;
}

int64_t Workspace::bytes() const {
  int64_t total = 0;
  for (const Buffer* buffer :
       {&residual,      &normed,     &normed_f32,     &q_a,      &q_a_normed, &kv_a,      &q,
        &q_nope,        &q_rope,     &heads_out,      &q_latent, &o_latent,   &absorbed,  &latent,
        &k_rope,        &kv,         &part,           &part_lse, &whole,      &whole_lse, &mha,
        &router_logits, &expert_ids, &expert_weights, &mlp}) {
    total += buffer->size();
  }
  return total;
}

}  // namespace fathom
