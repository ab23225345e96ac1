// Multi-head attention in tiles (FlashAttention-2, Dao 2023): a work item is one head and a block
// of queries; it packs each tile of 64 keys and values once and uses it for all its queries.
//
// A row's bits depend on its own query, the keys and `visible_before` only: tiles begin at
// multiples of 64 keys and each row's online softmax goes through them in order on any thread.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "base/math_constants.h"
#include "ops/attention/cpu/attention_cpu.h"
#include "ops/attention/workspace_arena.h"

namespace fathom::cpu {
namespace {

// Queries of a work item: packing a tile costs about 1/28 of its multiply-adds with 128 queries,
// and their sums (64 KB for values of 128) and the packed tile stay in the L2.
constexpr int64_t kBlockRows = 128;

// One thread's memory, sized for the wider (fp32) of the two element types.
struct Scratch {
  float* q;  // [kBlockRows, qk_dim rounded up to even], rotary part first
  std::byte* keys;
  std::byte* values;
  float* scores;  // [kMaxStripRows, kTileKeys]
  float* p;       // [kMaxStripRows, kTileKeys]
  float* sums;    // [kBlockRows, v_dim padded]
  float* max;     // [kBlockRows]
  float* sum;
  float* rescale;
  int32_t* visible;

  Scratch(WorkspaceArena& arena, int64_t qk_dim, int64_t v_dim)
      : q(arena.take<float>(kBlockRows * round_up(qk_dim, 2))),
        keys(arena.take<std::byte>(kScalarAttention.packed_keys_bytes(qk_dim))),
        values(arena.take<std::byte>(kScalarAttention.packed_values_bytes(v_dim))),
        scores(arena.take<float>(kMaxStripRows * kTileKeys)),
        p(arena.take<float>(kMaxStripRows * kTileKeys)),
        sums(arena.take<float>(kBlockRows * round_up(v_dim, kValuePadding))),
        max(arena.take<float>(kBlockRows)),
        sum(arena.take<float>(kBlockRows)),
        rescale(arena.take<float>(kBlockRows)),
        visible(arena.take<int32_t>(kBlockRows)) {}
};

struct Mha {
  const AttentionKernels& kernels;
  ConstTensorView q_nope, q_rope, kv, k_rope;
  int64_t visible_before;
  float scale;  // times log2(e)
  TensorView out, lse;

  int64_t keys() const { return kv.size(0); }
  int64_t nope() const { return q_nope.size(2); }
  int64_t rope() const { return q_rope.size(2); }
  int64_t qk_dim() const { return nope() + rope(); }
  int64_t q_stride() const { return round_up(qk_dim(), 2); }
  int64_t v_dim() const { return out.size(2); }
  int64_t v_stride() const { return round_up(v_dim(), kValuePadding); }
  int64_t element_bytes() const { return kernels.bf16_elements ? 2 : 4; }
  // Keys that query i sees.
  int64_t visible(int64_t i) const {
    return std::clamp<int64_t>(visible_before + i + 1, 0, keys());
  }
};

const std::byte* element_at(ConstTensorView view, int64_t i) {
  return static_cast<const std::byte*>(view.raw()) + i * size_of(view.dtype());
}

// The rotary part comes first: its size is even, so that the rest begins on a bf16 pair.
void load_queries(const Mha& mha, int64_t head, int64_t first, int64_t rows, const Scratch& to) {
  const int64_t bytes = mha.element_bytes();
  auto* q = reinterpret_cast<std::byte*>(to.q);
  for (int64_t row = 0; row < rows; ++row) {
    std::byte* out = q + row * mha.q_stride() * bytes;
    const auto copy = [&](ConstTensorView part, std::byte* at) {
      mha.kernels.convert(element_at(part, (first + row) * part.stride(0) + head * part.stride(1)),
                          part.dtype() == DType::kBF16, part.size(2), at);
    };
    copy(mha.q_rope, out);
    copy(mha.q_nope, out + mha.rope() * bytes);
    std::fill(out + mha.qk_dim() * bytes, out + mha.q_stride() * bytes, std::byte{0});
  }
}

void pack_tile(const Mha& mha, int64_t head, int64_t first_key, int64_t num_keys,
               const Scratch& to) {
  const bool rope_bf16 = mha.k_rope.dtype() == DType::kBF16;
  const bool kv_bf16 = mha.kv.dtype() == DType::kBF16;
  const int64_t kv_at = first_key * mha.kv.stride(0) + head * mha.kv.stride(1);
  mha.kernels.pack_keys(element_at(mha.k_rope, first_key * mha.k_rope.stride(0)),
                        mha.k_rope.stride(0), rope_bf16, num_keys, 0, mha.rope(), to.keys);
  mha.kernels.pack_keys(element_at(mha.kv, kv_at), mha.kv.stride(0), kv_bf16, num_keys, mha.rope(),
                        mha.nope(), to.keys);
  mha.kernels.pack_values(element_at(mha.kv, kv_at + mha.nope()), mha.kv.stride(0), kv_bf16,
                          num_keys, mha.v_dim(), to.values);
}

// One tile of keys for rows [begin, begin + rows) of the block.
void attend_strip(const Mha& mha, int64_t begin, int64_t rows, int64_t num_keys,
                  const Scratch& in) {
  const AttentionKernels& kernels = mha.kernels;
  const auto* q = reinterpret_cast<const std::byte*>(in.q);
  kernels.packed_scores(q + begin * mha.q_stride() * mha.element_bytes(), mha.q_stride(), rows,
                        in.keys, mha.qk_dim(), in.scores);
  kernels.softmax(in.scores, rows, in.visible + begin, mha.scale, in.max + begin, in.sum + begin,
                  in.rescale + begin, in.p);
  kernels.packed_values(in.p, rows, in.values, num_keys, mha.v_dim(), in.rescale + begin,
                        in.sums + begin * mha.v_stride(), mha.v_stride());
}

void store_block(const Mha& mha, int64_t head, int64_t first, int64_t rows, const Scratch& from) {
  for (int64_t row = 0; row < rows; ++row) {
    float* out = mha.out.row<float>(first + row) + head * mha.out.stride(1);
    const float sum = from.sum[row];
    if (sum > 0) {
      const float inverse = 1 / sum;
      for (int64_t i = 0; i < mha.v_dim(); ++i) {
        out[i] = from.sums[row * mha.v_stride() + i] * inverse;
      }
    } else {
      std::fill_n(out, mha.v_dim(), 0.0f);  // no visible key; its sums may be uninitialized
    }
    mha.lse.row<float>(first + row)[head] =
        sum > 0 ? from.max[row] / kLog2E + std::log(sum) : kNegativeInfinity;
  }
}

void attend_block(const Mha& mha, int64_t head, int64_t first, int64_t rows,
                  const Scratch& scratch) {
  load_queries(mha, head, first, rows, scratch);
  std::fill_n(scratch.max, rows, kNegativeInfinity);
  std::fill_n(scratch.sum, rows, 0.0f);
  const int64_t seen = mha.visible(first + rows - 1);
  for (int64_t first_key = 0; first_key < seen; first_key += kTileKeys) {
    const int64_t num_keys = std::min(kTileKeys, seen - first_key);
    pack_tile(mha, head, first_key, num_keys, scratch);
    for (int64_t row = 0; row < rows; ++row) {
      scratch.visible[row] = static_cast<int32_t>(
          std::clamp<int64_t>(mha.visible(first + row) - first_key, 0, num_keys));
    }
    const int64_t strip = mha.kernels.strip_rows;
    for (int64_t begin = 0; begin < rows; begin += strip) {
      const int64_t count = std::min(strip, rows - begin);
      if (scratch.visible[begin + count - 1] == 0) continue;  // earlier rows see no key either
      attend_strip(mha, begin, count, num_keys, scratch);
    }
  }
  store_block(mha, head, first, rows, scratch);
}

}  // namespace

int64_t mha_attention_workspace_bytes(int64_t /*num_heads*/, int64_t qk_dim, int64_t v_dim,
                                      int num_threads) {
  WorkspaceArena arena;
  for (int thread = 0; thread < num_threads; ++thread) Scratch(arena, qk_dim, v_dim);
  return arena.bytes();
}

void mha_attention(ThreadPool& pool, CpuIsa isa, ConstTensorView q_nope, ConstTensorView q_rope,
                   ConstTensorView kv, ConstTensorView k_rope, int64_t visible_before,
                   float softmax_scale, TensorView out, TensorView lse,
                   std::span<std::byte> workspace) {
  const bool bf16_inputs = q_nope.dtype() == DType::kBF16 && kv.dtype() == DType::kBF16 &&
                           k_rope.dtype() == DType::kBF16;
  const Mha mha{attention_kernels(isa, bf16_inputs),
                q_nope,
                q_rope,
                kv,
                k_rope,
                visible_before,
                softmax_scale * kLog2E,
                out,
                lse};
  const int64_t queries = q_nope.size(0);
  const int64_t heads = q_nope.size(1);
  const int64_t blocks = ceil_div(queries, kBlockRows);
  // Threads take items dynamically, the blocks that see the most keys first.
  std::atomic<int64_t> next = 0;
  pool.run([&](int thread) {
    WorkspaceArena arena(workspace);
    for (int before = 0; before < thread; ++before) Scratch(arena, mha.qk_dim(), mha.v_dim());
    const Scratch scratch(arena, mha.qk_dim(), mha.v_dim());
    for (int64_t item = next++; item < blocks * heads; item = next++) {
      const int64_t block = blocks - 1 - item / heads;
      const int64_t first = block * kBlockRows;
      attend_block(mha, item % heads, first, std::min(kBlockRows, queries - first), scratch);
    }
  });
}

}  // namespace fathom::cpu
