#include "ops/attention/cpu/attention_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/math_constants.h"

namespace fathom::cpu {
namespace {

// Below this many values a parallel region (0.5 to 1 us) costs more than it saves.
constexpr int64_t kParallelValues = int64_t{16} * 1024;

}  // namespace

const AttentionKernels& attention_kernels(CpuIsa isa, [[maybe_unused]] bool bf16_inputs) {
#if defined(__x86_64__)
  if (isa == CpuIsa::kAmx && bf16_inputs) return amx_bf16_attention();
  if (isa >= CpuIsa::kAvx512 && !bf16_inputs) return kAvx512Attention;
  if (isa >= CpuIsa::kAvx512) {
    return prefers_fma_for_bf16() ? kAvx512Bf16FmaAttention : kAvx512Bf16Attention;
  }
  if (isa == CpuIsa::kAvx2) return kAvx2Attention;
#endif
  return kScalarAttention;
}

void decode_key(const AttentionKernels& kernels, const LatentLayout& layout, const std::byte* row,
                std::byte* out) {
  const int64_t bytes = kernels.bf16_elements ? 2 : 4;
  const int64_t dims = layout.latent_dim + layout.rope_dim;
  switch (layout.format) {
    case CacheFormat::kF32:
    case CacheFormat::kBF16:
      kernels.convert(row, layout.format == CacheFormat::kBF16, dims, out);
      return;
    case CacheFormat::kE4M3:
    case CacheFormat::kE5M2:
      kernels.decode_fp8(row, layout.format == CacheFormat::kE5M2, dims, 1.0f, out);
      return;
    case CacheFormat::kFp8Scaled:
      break;
  }
  const std::byte* scales = row + layout.latent_dim;
  for (int64_t first = 0; first < layout.latent_dim; first += kLatentScaleBlock) {
    float scale = 0;
    std::memcpy(&scale, scales, sizeof scale);  // the row's parts need not be aligned
    scales += sizeof scale;
    kernels.decode_fp8(row + first, false, std::min(kLatentScaleBlock, layout.latent_dim - first),
                       scale, out + first * bytes);
  }
  kernels.convert(scales, true, layout.rope_dim, out + layout.latent_dim * bytes);
}

void gather_latent(ThreadPool& pool, CpuIsa isa, std::span<const int32_t> page_ids,
                   const LatentPages& pages, int64_t first, int64_t count, TensorView latent,
                   TensorView k_rope) {
  const LatentLayout& layout = pages.layout;
  const bool narrow = latent.dtype() == DType::kBF16;
  const AttentionKernels& kernels = attention_kernels(isa, narrow);
  const int64_t bytes = kernels.bf16_elements ? 2 : 4;
  const int64_t dims = layout.latent_dim + layout.rope_dim;
  const int64_t grain = std::max<int64_t>(1, kParallelValues / dims);
  pool.parallel_for(count, grain, [&](int64_t begin, int64_t end) {
    std::vector<std::byte> decoded(static_cast<size_t>(dims * bytes));
    const auto store = [&](int64_t from, TensorView part, int64_t i) {
      const std::byte* source = decoded.data() + from * bytes;
      if (kernels.bf16_elements || !narrow) {
        auto* out = static_cast<std::byte*>(part.raw()) + i * part.stride(0) * bytes;
        std::memcpy(out, source, static_cast<size_t>(part.size(1) * bytes));
        return;
      }
      for (int64_t d = 0; d < part.size(1); ++d) {
        part.row<bf16>(i)[d] = to_bf16(reinterpret_cast<const float*>(source)[d]);
      }
    };
    for (int64_t i = begin; i < end; ++i) {
      const int64_t token = first + i;
      decode_key(kernels, layout,
                 pages.row(page_ids[static_cast<size_t>(token / kPageSize)], token % kPageSize),
                 decoded.data());
      store(0, latent, i);
      store(layout.latent_dim, k_rope, i);
    }
  });
}

void merge_attention(ThreadPool& pool, ConstTensorView part, ConstTensorView part_lse,
                     TensorView out, TensorView lse) {
  const int64_t heads = out.size(1);
  const int64_t v = out.size(2);
  const int64_t grain = std::max<int64_t>(1, kParallelValues / std::max<int64_t>(1, heads * v));
  pool.parallel_for(out.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t head = 0; head < heads; ++head) {
        float& have = lse.row<float>(row)[head];
        const float added = part_lse.row<float>(row)[head];
        if (added == kNegativeInfinity) continue;
        const float max = std::max(have, added);
        const float keep = have == kNegativeInfinity ? 0.0f : std::exp(have - max);
        const float take = std::exp(added - max);
        const float total = keep + take;
        float* sums = out.row<float>(row) + head * out.stride(1);
        const float* more = part.row<float>(row) + head * part.stride(1);
        // Unwritten memory may be NaN: it is dropped, not multiplied by 0.
        if (have == kNegativeInfinity) {
          std::copy_n(more, v, sums);
        } else {
          for (int64_t i = 0; i < v; ++i) {
            sums[i] = sums[i] * (keep / total) + more[i] * (take / total);
          }
        }
        have = max + std::log(total);
      }
    }
  });
}

}  // namespace fathom::cpu
