#include "ops/rope/rope_cpu.h"

#include <algorithm>
#include <vector>

#include "cache/latent_row.h"
#include "device/cpu/isa.h"
#include "ops/rms_norm/rms_norm_cpu.h"

namespace fathom::cpu {
namespace {

// Below this many values a parallel region (0.5 to 1 us) costs more than it saves.
constexpr int64_t kParallelQueryValues = int64_t{16} * 1024;
constexpr int64_t kParallelCacheValues = int64_t{4} * 1024;

[[gnu::always_inline]] inline void store(float value, float& out) { out = value; }
[[gnu::always_inline]] inline void store(float value, bf16& out) { out = to_bf16(value); }

// How a rotated part of `dim` values, those of whole heads, is turned at one position.
struct Rotation {
  const float* cos_sin;  // [head_dim / 2, 2]
  int64_t dim, head_dim;
  RopePairs pairs;
};

template <typename T>
[[gnu::always_inline]] inline void rotate(const float* x, const Rotation& by, T* out) {
  for (int64_t head = 0; head < by.dim; head += by.head_dim, x += by.head_dim, out += by.head_dim) {
    if (by.pairs == RopePairs::kAdjacent) {
      for (int64_t i = 0; i < by.head_dim; i += 2) {
        store(x[i] * by.cos_sin[i] - x[i + 1] * by.cos_sin[i + 1], out[i]);
        store(x[i] * by.cos_sin[i + 1] + x[i + 1] * by.cos_sin[i], out[i + 1]);
      }
      continue;
    }
    const int64_t half = by.head_dim / 2;
    for (int64_t i = 0; i < half; ++i) {
      const float cosine = by.cos_sin[2 * i], sine = by.cos_sin[2 * i + 1];
      store(x[i] * cosine - x[i + half] * sine, out[i]);
      store(x[i] * sine + x[i + half] * cosine, out[i + half]);
    }
  }
}

// One head of one query: copies the unrotated part, rotates the rest.
template <typename T>
[[gnu::always_inline]] inline void split_head(const float* q, int64_t nope, const Rotation& by,
                                              T* q_nope, T* q_rope) {
  for (int64_t i = 0; i < nope; ++i) store(q[i], q_nope[i]);
  rotate(q + nope, by, q_rope);
}

template <typename T>
void split_head_portable(const float* q, int64_t nope, const Rotation& by, T* q_nope, T* q_rope) {
  split_head(q, nope, by, q_nope, q_rope);
}

template <typename T>
FATHOM_FOR_AVX512 void split_head_avx512(const float* q, int64_t nope, const Rotation& by,
                                         T* q_nope, T* q_rope) {
  split_head(q, nope, by, q_nope, q_rope);
}

// Converts kv_a's row to the cache's values, in fp32: out [latent + rope]. Without a weight the
// latent stays as it is.
[[gnu::always_inline]] inline void norm_and_rotate(const float* in, const float* weight,
                                                   int64_t latent, float eps, const Rotation& by,
                                                   float* out) {
  if (weight == nullptr) {
    std::copy_n(in, latent, out);
  } else {
    const float scale = inverse_rms(in, latent, eps);
    for (int64_t i = 0; i < latent; ++i) out[i] = weight[i] * (in[i] * scale);
  }
  rotate(in + latent, by, out + latent);
}

void norm_and_rotate_portable(const float* in, const float* weight, int64_t latent, float eps,
                              const Rotation& by, float* out) {
  norm_and_rotate(in, weight, latent, eps, by, out);
}

FATHOM_FOR_AVX512 void norm_and_rotate_avx512(const float* in, const float* weight, int64_t latent,
                                              float eps, const Rotation& by, float* out) {
  norm_and_rotate(in, weight, latent, eps, by, out);
}

template <typename T>
void split_rows(ThreadPool& pool, ConstTensorView q, std::span<const int32_t> positions,
                const RopeTable& table, TensorView q_nope, TensorView q_rope) {
  const int64_t heads = q.size(1);
  const int64_t nope = q_nope.size(2);
  const int64_t rope = q_rope.size(2);
  const auto head_kernel =
      cpu_isa() >= CpuIsa::kAvx512 ? split_head_avx512<T> : split_head_portable<T>;
  const int64_t grain = std::max<int64_t>(1, kParallelQueryValues / (heads * (nope + rope)));
  pool.parallel_for(q.size(0), grain, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    for (int64_t row = begin; row < end; ++row) {
      const Rotation by{cos_sin_of(table, positions[static_cast<size_t>(row)], scratch), rope,
                        table.dim(), table.pairs};
      for (int64_t head = 0; head < heads; ++head) {
        head_kernel(q.row<float>(row) + head * q.stride(1), nope, by,
                    q_nope.row<T>(row) + head * q_nope.stride(1),
                    q_rope.row<T>(row) + head * q_rope.stride(1));
      }
    }
  });
}

}  // namespace

const float* cos_sin_of(const RopeTable& table, int32_t position, std::vector<float>& scratch) {
  if (position < RopeTable::kTabulated) return table.tabulated.data() + position * table.dim();
  scratch.resize(static_cast<size_t>(table.dim()));
  table.compute(position, scratch.data());
  return scratch.data();
}

void split_rope_query(ThreadPool& pool, ConstTensorView q, std::span<const int32_t> positions,
                      const RopeTable& table, TensorView q_nope, TensorView q_rope) {
  if (q_nope.dtype() == DType::kF32) {
    split_rows<float>(pool, q, positions, table, q_nope, q_rope);
  } else {
    split_rows<bf16>(pool, q, positions, table, q_nope, q_rope);
  }
}

void norm_rope_cache_write(ThreadPool& pool, ConstTensorView kv_a,
                           std::span<const int32_t> positions, std::span<const int64_t> slots,
                           ConstTensorView norm_weight, float eps, const RopeTable& table,
                           const LatentPages& pages) {
  const int64_t latent = pages.layout.latent_dim;
  const int64_t rope = pages.layout.rope_dim;
  const float* weight = norm_weight.empty() ? nullptr : norm_weight.data<float>();
  const auto row_kernel =
      cpu_isa() >= CpuIsa::kAvx512 ? norm_and_rotate_avx512 : norm_and_rotate_portable;
  const int64_t grain = std::max<int64_t>(1, kParallelCacheValues / (latent + rope));
  pool.parallel_for(kv_a.size(0), grain, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    std::vector<float> values(static_cast<size_t>(latent + rope));
    for (int64_t row = begin; row < end; ++row) {
      const auto at = static_cast<size_t>(row);
      const Rotation by{cos_sin_of(table, positions[at], scratch), rope, table.dim(), table.pairs};
      row_kernel(kv_a.row<float>(row), weight, latent, eps, by, values.data());
      encode_row(pages.layout, values.data(), values.data() + latent,
                 pages.row(slots[at] / kPageSize, slots[at] % kPageSize));
    }
  });
}

}  // namespace fathom::cpu
