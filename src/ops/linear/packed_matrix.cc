// The packed order
//
//   matrix = groups of 64 rows, one after the other; the last one may have 32
//   group  = blocks of 128 columns (the last one shorter), and after each FP8 block its scales
//   block  = steps; step = for each of the group's pairs of panels: 32 rows x 2 columns
//
//   bf16  pair step, 128 bytes: panel A, panel B; a panel is 16 rows x (k, k + 1)
//   e4m3  pair step,  64 bytes: in each 16-byte lane L, rows 4L … 4L + 3 of panel A, then of B, so
//                     that interleaving the low (high) 8 bytes of the lanes gives panel A (B)
//   fp32  pair step, 128 bytes: 32 rows x 1 column
//   four  pair step,  64 bytes: 32 rows x 4 columns k … k + 3. The 16-bit word 2 r + p holds column
//   bits  k + p in bits 0-3 and k + 2 + p in bits 4-7 of panel A's row r, and the same of panel B's
//         in bits 8-15, so that the word shifted right by 0, 4, 8 and 12 indexes a table with one
//         panel's two columns, and a byte belongs to one row
//   scales of a block: 32 fp32 a pair, one a row
//
// A block of four-bit codes is a group of columns, at most 128, so that scales follow the codes
// that they multiply. They are fp32 or bf16; behind a pair's scales may be 32 bytes, 16 - zero
// point.
//
// A thread that owns a range of rows reads one ascending stream, the only access pattern that
// reaches the memory's full rate, and one vector load covers 16 outputs, so that no sum ever has to
// be added up across a register. A scale a row and block covers every form that checkpoints have,
// wherever the parts of a fused matrix meet, for 3 % more bytes. Rows and columns beyond the
// matrix are zero.
#include "ops/linear/packed_matrix.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <vector>

#include "ops/linear/panel_layout.h"

namespace fathom {
namespace {

// Bytes from a pair's step to the first value of its row `lane` (0 … 15 panel A, 16 … 31 panel B).
int64_t place_of(int64_t lane, WeightFormat format) {
  if (format == WeightFormat::kFourBit) return lane % 16 * 4 + lane / 16;
  if (format != WeightFormat::kF8E4M3) return lane * 4;
  return lane % 16 / 4 * 16 + lane / 16 * 8 + lane % 4 * 2;
}

// One row's codes of one block.
void pack_codes(const uint8_t* in, int64_t count, int64_t stride, std::byte* out) {
  for (int64_t k = 0; k < count; k += 4, out += stride) {
    uint8_t codes[4] = {};
    for (int64_t c = 0; c < std::min<int64_t>(4, count - k); ++c) codes[c] = in[k + c];
    out[0] = static_cast<std::byte>(codes[0] | codes[2] << 4);
    out[2] = static_cast<std::byte>(codes[1] | codes[3] << 4);
  }
}

// One row's values of one block. `Convert` maps a source value to a stored one.
template <typename Stored, typename Source, typename Convert>
void pack_row(const Source* in, int64_t count, int64_t stride, const Convert& convert,
              std::byte* out) {
  if constexpr (sizeof(Stored) == 4) {
    for (int64_t k = 0; k < count; ++k, out += stride) {
      const Stored value = convert(in[k]);
      std::memcpy(out, &value, sizeof value);
    }
  } else {
    for (int64_t k = 0; k + 1 < count; k += 2, out += stride) {
      const Stored two[2] = {convert(in[k]), convert(in[k + 1])};
      std::memcpy(out, two, sizeof two);
    }
    if (count % 2 != 0) {
      const Stored two[2] = {convert(in[count - 1]), Stored{}};
      std::memcpy(out, two, sizeof two);
    }
  }
}

// Four FP8 rows that lie side by side in a pair's steps: 8 bytes a step, where a row alone would be
// a store of 2 bytes.
void pack_four_rows(const e4m3* const (&rows)[4], int64_t count, int64_t stride, std::byte* out) {
  static_assert(std::endian::native == std::endian::little);
  for (int64_t k = 0; k + 1 < count; k += 2, out += stride) {
    uint16_t codes[4];
    for (int r = 0; r < 4; ++r) std::memcpy(&codes[r], rows[r] + k, sizeof codes[r]);
    const uint64_t step = uint64_t{codes[0]} | uint64_t{codes[1]} << 16 | uint64_t{codes[2]} << 32 |
                          uint64_t{codes[3]} << 48;
    std::memcpy(out, &step, sizeof step);
  }
  if (count % 2 == 0) return;
  for (int64_t r = 0; r < 4; ++r) {
    const e4m3 two[2] = {rows[r][count - 1], {}};
    std::memcpy(out + r * 2, two, sizeof two);
  }
}

template <typename Stored, typename Source, typename Convert>
void pack_values(const PanelLayout& layout, WeightFormat format, std::byte* memory,
                 int64_t first_row, ConstTensorView values, const Convert& convert) {
  constexpr bool kFp8 = std::is_same_v<Stored, e4m3>;
  // Packs a group's rows by eight blocks at a time: each row is read in a run that the prefetcher
  // sees, and the packed lines, which all rows touch, stay in L2 meanwhile.
  constexpr int64_t kBlocks = 8;
  const int64_t columns = values.size(1);
  const int64_t end = first_row + values.size(0);
  const auto source_row = [&](int64_t row) { return values.row<Source>(row - first_row); };
  constexpr int64_t kTwoPairs = int64_t{2} * kPairRows;
  for (int64_t begin = first_row; begin < end;) {
    const int64_t stop = std::min(end, (begin / kTwoPairs + 1) * kTwoPairs);
    const int64_t width = layout.block_columns(), run = kBlocks * kBlockColumns / width;
    for (int64_t first = 0; first < layout.num_blocks(); first += run) {
      const int64_t last = std::min(layout.num_blocks(), first + run);
      for (int64_t row = begin; row < stop;) {
        const int64_t pair = row / kPairRows;
        const int64_t place = place_of(row % kPairRows, format);
        const int64_t stride = layout.step_stride(layout.pairs_of_group(pair));
        const bool four = kFp8 && row % 4 == 0 && row + 4 <= stop;
        for (int64_t block = first; block < last; ++block) {
          const int64_t column = block * width;
          const int64_t count = std::min(width, columns - column);
          std::byte* const out = memory + layout.block_offset(pair, block) + place;
          if constexpr (std::is_same_v<Stored, uint8_t>) {
            pack_codes(source_row(row) + column, count, stride, out);
            continue;
          }
          if constexpr (kFp8) {
            if (four) {
              const e4m3* const rows[4] = {source_row(row) + column, source_row(row + 1) + column,
                                           source_row(row + 2) + column,
                                           source_row(row + 3) + column};
              pack_four_rows(rows, count, stride, out);
              continue;
            }
          }
          pack_row<Stored>(source_row(row) + column, count, stride, convert, out);
        }
        row += four ? 4 : 1;
      }
    }
    begin = stop;
  }
}

// A row's place among its block's scales.
std::byte* scale_of(const PanelLayout& layout, std::byte* memory, int64_t row, int64_t block,
                    DType type) {
  return memory + layout.scales_offset(row / kPairRows, block) + row % kPairRows * size_of(type);
}

// The same of its zero points, which follow the pair's scales.
std::byte* zero_point_of(const PanelLayout& layout, std::byte* memory, int64_t row, int64_t block,
                         DType type) {
  return memory + layout.scales_offset(row / kPairRows, block) + kPairRows * size_of(type) +
         row % kPairRows;
}

// Zeroes rows [rows, …) up to the end of the last pair.
void zero_padding_rows(const PanelLayout& layout, std::byte* memory, int64_t rows,
                       const PackedForm& form) {
  const WeightFormat format = form.format;
  const bool four_bit = format == WeightFormat::kFourBit;
  const bool scaled = four_bit || format == WeightFormat::kF8E4M3;
  for (int64_t row = rows; row < layout.num_pairs() * kPairRows; ++row) {
    const int64_t pair = row / kPairRows;
    const int64_t lane = row % kPairRows;
    const int64_t stride = layout.step_stride(layout.pairs_of_group(pair));
    for (int64_t block = 0; block < layout.num_blocks(); ++block) {
      std::byte* out = memory + layout.block_offset(pair, block) + place_of(lane, format);
      for (int64_t s = 0; s < layout.steps_of_block(block); ++s, out += stride) {
        if (four_bit) {
          out[0] = out[2] = std::byte{0};
        } else {
          std::memset(out, 0, scaled ? 2 : 4);
        }
      }
      if (!scaled) continue;
      std::memset(scale_of(layout, memory, row, block, form.scales), 0,
                  static_cast<size_t>(size_of(form.scales)));
      if (form.zeros) *zero_point_of(layout, memory, row, block, form.scales) = std::byte{0};
    }
  }
}

// Whether the columns of each packed block share scales: a slice that begins inside a block of
// scales ends there.
bool has_a_scale_a_block(const ScaledMatrix& source) {
  if (source.scales.empty()) return true;
  const int64_t begin = source.scale_col % source.scale_cols;
  return begin % kBlockColumns == 0 || begin + source.cols() <= source.scale_cols;
}

void pack_scales(const PanelLayout& layout, std::byte* memory, int64_t first_row,
                 const PackedForm& form, const ScaledMatrix& source) {
  for (int64_t block = 0; block < layout.num_blocks(); ++block) {
    const int64_t column = block * layout.block_columns();
    for (int64_t r = 0; r < source.rows(); ++r) {
      const int64_t row = first_row + r;
      const float scale = source.scale_at(r, column);
      std::byte* const place = scale_of(layout, memory, row, block, form.scales);
      if (form.scales == DType::kBF16) {
        const bf16 narrow = to_bf16(scale);
        FATHOM_CHECK(to_float(narrow) == scale, "a scale of {} as bf16", scale);
        std::memcpy(place, &narrow, sizeof narrow);
      } else {
        std::memcpy(place, &scale, sizeof scale);
      }
      if (form.zeros) {
        *zero_point_of(layout, memory, row, block, form.scales) =
            static_cast<std::byte>(kFourBitCodes - source.zero_at(r, column));
      }
    }
  }
}

void pack_four_bit(const PanelLayout& layout, std::byte* memory, int64_t first_row,
                   const PackedForm& form, const ScaledMatrix& source) {
  FATHOM_CHECK(source.is_four_bit() && !source.scales.empty() && source.code == form.code &&
                   source.zeros.empty() == !form.zeros && source.scale_rows == 1,
               "four-bit weights from {}", name_of(source.values.dtype()));
  const int64_t group = form.group_cols;
  FATHOM_CHECK(group == 0 || kBlockColumns % group == 0 || group % kBlockColumns == 0,
               "groups of {} columns", group);
  FATHOM_CHECK(source.scale_cols == group || (group == 0 && source.scale_cols >= source.cols()),
               "scales every {} columns, the form has {}", source.scale_cols, group);
  FATHOM_CHECK(group == 0 || source.scale_col % std::min<int64_t>(group, kBlockColumns) == 0,
               "columns from {}, scales every {}", source.scale_col, group);
  pack_values<uint8_t, uint8_t>(layout, form.format, memory, first_row, source.values,
                                [](uint8_t code) { return code; });
  pack_scales(layout, memory, first_row, form, source);
}

template <typename Source>
void pack_f32(const PanelLayout& layout, std::byte* memory, int64_t first_row,
              const ScaledMatrix& source) {
  if (source.scales.empty()) {
    pack_values<float, Source>(layout, WeightFormat::kF32, memory, first_row, source.values,
                               [](Source value) { return to_float(value); });
    return;
  }
  // With scales, row by row: the reference path, exactness before speed.
  std::vector<float> row(static_cast<size_t>(source.cols()));
  for (int64_t r = 0; r < source.rows(); ++r) {
    for (int64_t c = 0; c < source.cols(); ++c) row[static_cast<size_t>(c)] = source.at(r, c);
    pack_values<float, float>(layout, WeightFormat::kF32, memory, first_row + r,
                              ConstTensorView(row.data(), {1, source.cols()}),
                              [](float value) { return value; });
  }
}

template <typename Source>
void pack_bf16(const PanelLayout& layout, std::byte* memory, int64_t first_row,
               const ScaledMatrix& source) {
  pack_values<bf16, Source>(layout, WeightFormat::kBF16, memory, first_row, source.values,
                            [](Source value) {
                              if constexpr (std::is_same_v<Source, bf16>) {
                                return value;
                              } else {
                                return to_bf16(to_float(value));
                              }
                            });
}

// Whether the eight codes have none that is zero, subnormal or NaN. May say no where it is so.
bool are_normal(uint64_t codes) {
  constexpr uint64_t kOnes = 0x0101010101010101;
  const auto has_zero_byte = [](uint64_t bytes) {
    return ((bytes - kOnes) & ~bytes & kOnes << 7) != 0;
  };
  return !has_zero_byte(codes & kOnes * 0x78) && !has_zero_byte(~codes & kOnes * 0x7F);
}

bool is_normal(uint8_t code) { return (code & 0x78) != 0 && (code & 0x7F) != 0x7F; }

// The word of a block of up to 128 codes.
uint64_t rare_steps_of(const e4m3* codes, int64_t count) {
  uint64_t word = 0;
  for (int64_t first = 0; first < count; first += 8) {
    uint64_t eight = 0;
    const int64_t end = std::min<int64_t>(first + 8, count);
    if (end == first + 8) {
      std::memcpy(&eight, codes + first, sizeof eight);
      if (are_normal(eight)) continue;
    }
    for (int64_t k = first; k < end; ++k) {
      if (!is_normal(codes[k].bits)) word |= uint64_t{1} << (k / 2);
    }
  }
  if (count % 2 != 0) word |= uint64_t{1} << (count / 2);  // the padding is zero
  return word;
}

}  // namespace

Result<PackedMatrix> PackedMatrix::allocate(int64_t rows, int64_t cols, const PackedForm& form,
                                            std::string_view purpose) {
  FATHOM_CHECK(rows > 0 && cols > 0, "[{}, {}] for {}", rows, cols, purpose);
  const PanelLayout layout(rows, cols, form);
  PackedMatrix matrix;
  FATHOM_TRY(matrix.memory_, Buffer::allocate(layout.total_bytes(), purpose));
  if (form.format == WeightFormat::kF8E4M3) {
    const int64_t words = ceil_div(layout.num_pairs(), 2) * layout.num_blocks();
    FATHOM_TRY(matrix.rare_steps_, Buffer::allocate(words * int64_t{sizeof(uint64_t)}, purpose));
    std::fill_n(reinterpret_cast<uint64_t*>(matrix.rare_steps_.data()), words, 0);
  }
  matrix.rows_ = rows;
  matrix.cols_ = cols;
  matrix.form_ = form;
  if (form.reordered) {
    matrix.columns_ = std::make_shared<std::vector<int32_t>>(static_cast<size_t>(cols));
  }
  return matrix;
}

PackedMatrix PackedMatrix::share() const {
  PackedMatrix other;
  other.rows_ = rows_;
  other.cols_ = cols_;
  other.form_ = form_;
  other.memory_ = memory_.share();
  other.columns_ = columns_;
  other.rare_steps_ = rare_steps_.share();
  return other;
}

void PackedMatrix::set_columns(std::span<const int32_t> columns) {
  FATHOM_CHECK(columns_ != nullptr && columns.size() == columns_->size(), "{} columns of {}",
               columns.size(), cols_);
  std::copy(columns.begin(), columns.end(), columns_->begin());
}

const uint64_t* PackedMatrix::rare_steps(int64_t group, int64_t block) const {
  if (form_.format != WeightFormat::kF8E4M3) return nullptr;
  return reinterpret_cast<const uint64_t*>(rare_steps_.data()) +
         group * ceil_div(cols_, kBlockColumns) + block;
}

// Other threads pack other rows of the same group.
void PackedMatrix::mark_rare_steps(int64_t first_row, ConstTensorView codes) {
  for (int64_t r = 0; r < codes.size(0); ++r) {
    auto* const words =
        const_cast<uint64_t*>(rare_steps((first_row + r) / (int64_t{2} * kPairRows), 0));
    for (int64_t column = 0; column < cols_; column += kBlockColumns) {
      const uint64_t word = rare_steps_of(codes.row<e4m3>(r) + column,
                                          std::min<int64_t>(kBlockColumns, cols_ - column));
      if (word == 0) continue;
      std::atomic_ref(words[column / kBlockColumns]).fetch_or(word, std::memory_order_relaxed);
    }
  }
}

void PackedMatrix::pack(int64_t first_row, const ScaledMatrix& source) {
  FATHOM_CHECK(source.cols() == cols_ && first_row >= 0 && first_row + source.rows() <= rows_,
               "rows {}+{} of [{}, {}] from {}", first_row, source.rows(), rows_, cols_,
               source.values.shape_string());
  const DType dtype = source.values.dtype();
  const PanelLayout layout(*this);
  std::byte* const memory = memory_.data();
  switch (form_.format) {
    case WeightFormat::kF32:
      if (dtype == DType::kF32) pack_f32<float>(layout, memory, first_row, source);
      if (dtype == DType::kBF16) pack_f32<bf16>(layout, memory, first_row, source);
      if (dtype == DType::kF16) pack_f32<f16>(layout, memory, first_row, source);
      if (dtype == DType::kF8E4M3) pack_f32<e4m3>(layout, memory, first_row, source);
      FATHOM_CHECK(dtype != DType::kU8, "fp32 weights from four-bit codes");
      break;
    case WeightFormat::kBF16:
      FATHOM_CHECK(source.scales.empty(), "bf16 weights from scaled {}", name_of(dtype));
      FATHOM_CHECK(size_of(dtype) > 1, "bf16 weights from {}", name_of(dtype));
      if (dtype == DType::kF32) pack_bf16<float>(layout, memory, first_row, source);
      if (dtype == DType::kBF16) pack_bf16<bf16>(layout, memory, first_row, source);
      if (dtype == DType::kF16) pack_bf16<f16>(layout, memory, first_row, source);
      break;
    case WeightFormat::kF8E4M3:
      FATHOM_CHECK(dtype == DType::kF8E4M3, "FP8 weights from {}", name_of(dtype));
      FATHOM_CHECK(source.scales.empty() || source.scale_cols >= cols_ ||
                       source.scale_cols % kBlockColumns == 0,
                   "scales every {} columns; the blocks have {}", source.scale_cols, kBlockColumns);
      FATHOM_CHECK(has_a_scale_a_block(source), "columns {}+{}, scales every {}", source.scale_col,
                   cols_, source.scale_cols);
      pack_values<e4m3, e4m3>(layout, form_.format, memory, first_row, source.values,
                              [](e4m3 value) { return value; });
      pack_scales(layout, memory, first_row, form_, source);
      mark_rare_steps(first_row, source.values);
      break;
    case WeightFormat::kFourBit:
      pack_four_bit(layout, memory, first_row, form_, source);
      break;
  }
  if (first_row + source.rows() == rows_) {
    zero_padding_rows(layout, memory, rows_, form_);
  }
}

}  // namespace fathom
