// The widths of a model of grouped-query attention before and after its conversion to MLA.
#pragma once

#include <cstdint>
#include <optional>

#include "base/status.h"
#include "checkpoint/model_config.h"

namespace fathom::mla {

// What the user asks for; what is not given follows from the model.
struct MlaRequest {
  std::optional<int64_t> rank;      // kv_lora_rank
  std::optional<int64_t> rope_dim;  // qk_rope_head_dim
  std::optional<int64_t> fold;      // neighbouring frequencies that are taken as equal
};

struct MlaShape {
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t rope_dim = 0;
  int64_t rank = 0;
  int64_t fold = 1;

  int64_t key_dim() const { return kv_heads * head_dim; }  // of all KV heads
  int64_t unrotated() const { return key_dim() - rope_dim; }
  int64_t num_frequencies() const { return head_dim / 2; }
  // The rotated part is that of so many heads, each with one frequency in `collapse` of the
  // source's.
  int64_t rope_heads() const { return rope_dim > head_dim ? rope_dim / head_dim : 1; }
  int64_t collapse() const { return rope_dim > head_dim ? 1 : head_dim / rope_dim; }
  // The most that a rank can be: values and unrotated keys.
  int64_t most_rank() const { return key_dim() + unrotated(); }
  // Nothing is lost but rounding.
  bool is_lossless() const { return rope_dim == key_dim() && rank == key_dim() && fold == 1; }
};

// Refuses models that are not of grouped-query attention or are quantized, and sizes that do not
// fit; the error names the flag. Without a rope_dim it is 64 where that is possible, otherwise one
// head's width; without a rank 512, or the most that there is.
Result<MlaShape> plan_mla_shape(const ModelConfig& config, const MlaRequest& request);

}  // namespace fathom::mla
