#include "ops/attention/attention.h"

#include "ops/attention/attention_checks.h"
#include "ops/attention/cpu/attention_cpu.h"

namespace fathom {
namespace {

// Every page that a listed sequence reads must exist: a wrong page id would read other sequences'
// memory.
void check_batch(const PagedBatch& batch, std::span<const int32_t> sequences,
                 const LatentPages& pages, int64_t rows) {
  for (const int32_t s : sequences) {
    FATHOM_CHECK(s >= 0 && s < batch.num_sequences(), "sequence {} of {}", s,
                 batch.num_sequences());
    FATHOM_CHECK(batch.query_start[s] >= 0 && batch.num_queries(s) >= 0 &&
                     batch.query_start[s + 1] <= rows && batch.context_lens[s] >= batch.first_key,
                 "sequence {}: rows {} to {} of {}, context {}", s, batch.query_start[s],
                 batch.query_start[s + 1], rows, batch.context_lens[s]);
    const int64_t used = (batch.total_len(s) + kPageSize - 1) / kPageSize;
    FATHOM_CHECK(used <= batch.max_pages, "sequence {}: {} tokens in {} pages", s,
                 batch.total_len(s), batch.max_pages);
    for (int64_t i = 0; i < used; ++i) {
      const int32_t page = batch.pages(s)[static_cast<size_t>(i)];
      FATHOM_CHECK(page >= 0 && page < pages.num_pages, "page {} of {}", page, pages.num_pages);
    }
  }
}

}  // namespace

int64_t absorbed_attention_workspace_bytes(int64_t rows, int64_t num_heads, int64_t latent_dim,
                                           int num_threads, int64_t rope_dim) {
  return cpu::absorbed_attention_workspace_bytes(rows, num_heads, latent_dim, num_threads,
                                                 rope_dim);
}

void absorbed_attention(const Stream& stream, ConstTensorView q_latent, ConstTensorView q_rope,
                        const PagedBatch& batch, std::span<const int32_t> sequences,
                        const LatentPages& pages, float softmax_scale, TensorView out,
                        std::span<std::byte> workspace) {
  check_absorbed_operands(q_latent, q_rope, out, pages.layout);
  check_batch(batch, sequences, pages, q_latent.size(0));
  switch (stream.device()) {
    case DeviceKind::kCpu:
      cpu::absorbed_attention(stream.pool(), cpu_isa(), q_latent, q_rope, batch, sequences, pages,
                              softmax_scale, out, workspace);
  }
}

void gather_latent(const Stream& stream, std::span<const int32_t> page_ids,
                   const LatentPages& pages, int64_t first, int64_t count, TensorView latent,
                   TensorView k_rope) {
  FATHOM_CHECK(latent.rank() == 2 && k_rope.rank() == 2 && latent.size(0) == count &&
                   k_rope.size(0) == count && latent.size(1) == pages.layout.latent_dim &&
                   k_rope.size(1) == pages.layout.rope_dim,
               "{} rows of {} + {} to {} and {}", count, pages.layout.latent_dim,
               pages.layout.rope_dim, latent.shape_string(), k_rope.shape_string());
  FATHOM_CHECK(is_float(latent) && latent.dtype() == k_rope.dtype(), "latent {}, k_rope {}",
               name_of(latent.dtype()), name_of(k_rope.dtype()));
  FATHOM_CHECK(first >= 0 && (first + count + kPageSize - 1) / kPageSize <=
                                 static_cast<int64_t>(page_ids.size()),
               "rows {} + {} of {} pages", first, count, page_ids.size());
  switch (stream.device()) {
    case DeviceKind::kCpu:
      cpu::gather_latent(stream.pool(), cpu_isa(), page_ids, pages, first, count, latent, k_rope);
  }
}

int64_t mha_attention_workspace_bytes(int64_t num_heads, int64_t qk_dim, int64_t v_dim,
                                      int num_threads) {
  return cpu::mha_attention_workspace_bytes(num_heads, qk_dim, v_dim, num_threads);
}

void mha_attention(const Stream& stream, ConstTensorView q_nope, ConstTensorView q_rope,
                   ConstTensorView kv, ConstTensorView k_rope, int64_t visible_before,
                   float softmax_scale, TensorView out, TensorView lse,
                   std::span<std::byte> workspace) {
  FATHOM_CHECK(q_nope.rank() == 3 && q_rope.rank() == 3 && kv.rank() == 3 && k_rope.rank() == 2 &&
                   out.rank() == 3 && lse.rank() == 2,
               "q_nope {}, q_rope {}, kv {}, k_rope {}, out {}, lse {}", q_nope.shape_string(),
               q_rope.shape_string(), kv.shape_string(), k_rope.shape_string(), out.shape_string(),
               lse.shape_string());
  const int64_t queries = q_nope.size(0);
  const int64_t heads = q_nope.size(1);
  FATHOM_CHECK(q_rope.size(0) == queries && out.size(0) == queries && lse.size(0) == queries &&
                   q_rope.size(1) == heads && kv.size(1) == heads && out.size(1) == heads &&
                   lse.size(1) == heads && k_rope.size(0) == kv.size(0) &&
                   k_rope.size(1) == q_rope.size(2) && kv.size(2) == q_nope.size(2) + out.size(2),
               "q_nope {}, q_rope {}, kv {}, k_rope {}, out {}, lse {}", q_nope.shape_string(),
               q_rope.shape_string(), kv.shape_string(), k_rope.shape_string(), out.shape_string(),
               lse.shape_string());
  FATHOM_CHECK(
      is_float(q_nope) && q_rope.dtype() == q_nope.dtype() && is_float(kv) && is_float(k_rope),
      "q_nope {}, q_rope {}, kv {}, k_rope {}", name_of(q_nope.dtype()), name_of(q_rope.dtype()),
      name_of(kv.dtype()), name_of(k_rope.dtype()));
  switch (stream.device()) {
    case DeviceKind::kCpu:
      cpu::mha_attention(stream.pool(), cpu_isa(), q_nope, q_rope, kv, k_rope, visible_before,
                         softmax_scale, out, lse, workspace);
  }
}

void merge_attention(const Stream& stream, ConstTensorView part, ConstTensorView part_lse,
                     TensorView out, TensorView lse) {
  FATHOM_CHECK(part.rank() == 3 && out.rank() == 3 && part_lse.rank() == 2 && lse.rank() == 2 &&
                   part.size(0) == out.size(0) && part.size(1) == out.size(1) &&
                   part.size(2) == out.size(2) && part_lse.size(0) == out.size(0) &&
                   part_lse.size(1) == out.size(1) && lse.size(0) == out.size(0) &&
                   lse.size(1) == out.size(1),
               "part {}, part_lse {}, out {}, lse {}", part.shape_string(), part_lse.shape_string(),
               out.shape_string(), lse.shape_string());
  switch (stream.device()) {
    case DeviceKind::kCpu:
      cpu::merge_attention(stream.pool(), part, part_lse, out, lse);
  }
}

}  // namespace fathom
