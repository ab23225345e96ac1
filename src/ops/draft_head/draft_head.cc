#include "ops/draft_head/draft_head.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "base/math.h"
#include "device/cpu/isa.h"
#include "ops/draft_head/draft_head_kernels.h"

namespace fathom {
namespace {

constexpr int kMaxX = 127;

// The nearest code; NaN becomes the lowest.
int code_of(float value, float inverse, int largest) {
  const auto most = static_cast<float>(largest);
  float scaled = value * inverse;
  scaled = scaled >= -most ? scaled : -most;
  return static_cast<int>(std::lrintf(std::min(scaled, most)));
}

// Codes + kZero of one row to out [4 * steps]; returns the codes' scale. `out` is kZero behind the
// row's end.
template <typename T>
float quantize_row(const T* x, int64_t count, uint8_t* out) {
  float most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, std::abs(to_float(x[i])));
  if (!(most > 0) || std::isinf(most)) most = 1;
  const float inverse = kMaxX / most;
  for (int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<uint8_t>(code_of(to_float(x[i]), inverse, kMaxX) + kZero);
  }
  return most / kMaxX;
}

}  // namespace

PanelSums panel_sums(CpuIsa isa) {
#if defined(__x86_64__)
  if (isa >= CpuIsa::kAvx512) return panel_sums_avx512;
  if (isa == CpuIsa::kAvx2) return panel_sums_avx2;
#endif
  return isa == CpuIsa::kScalar ? panel_sums_scalar : nullptr;
}

Result<DraftHead> DraftHead::allocate(int64_t rows, int64_t cols, std::string_view purpose) {
  static_assert(kMostCols * (kMaxX + kZero) * kMaxCode <= INT32_MAX);
  FATHOM_CHECK(rows > 0 && rows <= INT32_MAX && cols > 0 && cols <= kMostCols, "[{}, {}] for {}",
               rows, cols, purpose);
  const int64_t padded = round_up(rows, kPanelRows);
  DraftHead head;
  FATHOM_TRY(head.codes_, Buffer::allocate(padded * round_up(cols, kStepColumns), purpose));
  FATHOM_TRY(head.scales_, Buffer::allocate(padded * int64_t{sizeof(float)}, purpose));
  FATHOM_TRY(head.offsets_, Buffer::allocate(padded * int64_t{sizeof(int32_t)}, purpose));
  head.rows_ = rows;
  head.cols_ = cols;
  return head;
}

int64_t DraftHead::bytes_of(int64_t rows, int64_t cols) {
  constexpr int64_t kOfScale = sizeof(float) + sizeof(int32_t);
  return round_up(rows, kPanelRows) * (round_up(cols, kStepColumns) + kOfScale);
}

void DraftHead::pack(const ScaledMatrix& source) {
  FATHOM_CHECK(source.rows() == rows_ && source.cols() == cols_ && !source.is_four_bit(),
               "[{}, {}] from {}", rows_, cols_, source.values.shape_string());
  std::fill_n(codes_.data(), codes_.size(), std::byte{0});
  std::fill_n(scales_.data(), scales_.size(), std::byte{0});
  std::fill_n(offsets_.data(), offsets_.size(), std::byte{0});
  auto* const scales = reinterpret_cast<float*>(scales_.data());
  auto* const offsets = reinterpret_cast<int32_t*>(offsets_.data());
  std::vector<float> row(static_cast<size_t>(cols_));
  for (int64_t r = 0; r < rows_; ++r) {
    float most = 0;
    bool is_finite = true;
    for (int64_t c = 0; c < cols_; ++c) {
      const float value = source.at(r, c);
      row[static_cast<size_t>(c)] = value;
      most = std::max(most, std::abs(value));
      is_finite = is_finite && std::isfinite(value);
    }
    if (!is_finite || most == 0) continue;
    auto* out = reinterpret_cast<int8_t*>(codes_.data()) +
                r / kPanelRows * kPanelRows * round_up(cols_, kStepColumns) +
                r % kPanelRows * kStepColumns;
    int32_t sum = 0;
    for (int64_t c = 0; c < cols_; ++c) {
      const int code = code_of(row[static_cast<size_t>(c)], kMaxCode / most, kMaxCode);
      out[c / kStepColumns * kPanelRows * kStepColumns + c % kStepColumns] =
          static_cast<int8_t>(code);
      sum += code;
    }
    scales[r] = most / kMaxCode;
    offsets[r] = kZero * sum;
  }
}

DraftHead DraftHead::share() const {
  DraftHead other;
  other.rows_ = rows_;
  other.cols_ = cols_;
  other.codes_ = codes_.share();
  other.scales_ = scales_.share();
  other.offsets_ = offsets_.share();
  return other;
}

int64_t draft_scratch_bytes(int64_t count, int64_t cols) {
  return count * (round_up(cols, kStepColumns) + int64_t{sizeof(float)});
}

void approximate_logits(const Stream& stream, ConstTensorView x, const DraftHead& head,
                        std::span<std::byte> scratch, TensorView out) {
  const int64_t count = x.size(0), cols = head.cols_;
  FATHOM_CHECK(x.size(1) == cols && out.size(0) == count && out.size(1) == head.rows_,
               "{} times [{}, {}] to {}", x.shape_string(), head.rows_, cols, out.shape_string());
  FATHOM_CHECK(std::ssize(scratch) >= draft_scratch_bytes(count, cols), "{} bytes for {} rows",
               scratch.size(), count);
  const PanelSums sums_of = panel_sums(cpu_isa());
  const int64_t padded = round_up(cols, kStepColumns), panels = ceil_div(head.rows_, kPanelRows);
  auto* const codes = reinterpret_cast<uint8_t*>(scratch.data());
  auto* const scales = reinterpret_cast<float*>(scratch.data() + count * padded);
  std::fill_n(codes, count * padded, uint8_t{kZero});
  for (int64_t r = 0; r < count; ++r) {
    uint8_t* const row = codes + r * padded;
    scales[r] = x.dtype() == DType::kBF16 ? quantize_row(x.row<bf16>(r), cols, row)
                                          : quantize_row(x.row<float>(r), cols, row);
  }
  const auto* const weights = reinterpret_cast<const int8_t*>(head.codes_.data());
  const auto* const row_scales = reinterpret_cast<const float*>(head.scales_.data());
  const auto* const offsets = reinterpret_cast<const int32_t*>(head.offsets_.data());
  constexpr int64_t kGrain = 4;  // panels, 64 KiB of 256 columns
  stream.pool().parallel_for(panels, kGrain, [&](int64_t begin, int64_t end) {
    alignas(64) int32_t sums[kMostRows * kPanelRows];
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * kPanelRows;
      const int64_t wanted = std::min<int64_t>(kPanelRows, head.rows_ - first);
      for (int64_t r = 0; r < count; r += kMostRows) {
        const int rows = static_cast<int>(std::min<int64_t>(kMostRows, count - r));
        sums_of(codes + r * padded, rows, weights + first * padded, padded / kStepColumns, sums);
        for (int i = 0; i < rows; ++i) {
          const float scale = scales[r + i];
          float* const to = out.row<float>(r + i) + first;
          for (int64_t j = 0; j < wanted; ++j) {
            to[j] = static_cast<float>(sums[i * kPanelRows + j] - offsets[first + j]) *
                    (row_scales[first + j] * scale);
          }
        }
      }
    }
  });
}

}  // namespace fathom
