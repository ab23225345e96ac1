#include "checkpoint/four_bit_decode.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "base/math.h"

namespace fathom {
namespace {

using Kind = QuantizationConfig::Kind;

constexpr int64_t kPerWord = 8;
// AWQ's nibble k of a word is column kAwqOrder[k] of its eight.
constexpr int64_t kAwqOrder[kPerWord] = {0, 2, 4, 6, 1, 3, 5, 7};
constexpr int64_t kSequential[kPerWord] = {0, 1, 2, 3, 4, 5, 6, 7};

uint32_t word_at(const std::byte* stored, int64_t index) {
  uint32_t word = 0;
  std::memcpy(&word, stored + 4 * index, sizeof word);
  return word;
}

uint8_t nibble(uint32_t word, int64_t index) {
  return static_cast<uint8_t>(word >> (4 * index) & 0xF);
}

// Rows of codes, two a byte, the even column in the low half; row_bytes from row to row.
void decode_rows(const std::byte* stored, int64_t row_bytes, int64_t rows, int64_t cols,
                 uint8_t* codes) {
  for (int64_t r = 0; r < rows; ++r, stored += row_bytes, codes += cols) {
    for (int64_t c = 0; c < cols; ++c) {
      const auto byte = static_cast<uint8_t>(stored[c / 2]);
      codes[c] = c % 2 == 0 ? byte & 0xF : byte >> 4;
    }
  }
}

// [outer, inner / 8] words, whose nibbles run along `inner` by `order`, into [inner, outer]: eight
// outputs a word, by tiles of words so that lines of both sides stay in the cache.
template <typename Store>
void transpose_words(const std::byte* stored, int64_t outer, int64_t inner,
                     const int64_t (&order)[kPerWord], const Store& store) {
  constexpr int64_t kTileWords = 16;
  const int64_t words = inner / kPerWord;
  for (int64_t tile = 0; tile < words; tile += kTileWords) {
    const int64_t end = std::min(tile + kTileWords, words);
    for (int64_t o = 0; o < outer; ++o) {
      for (int64_t w = tile; w < end; ++w) {
        const uint32_t word = word_at(stored, o * words + w);
        for (int64_t k = 0; k < kPerWord; ++k) store(w * kPerWord + order[k], o, nibble(word, k));
      }
    }
  }
}

}  // namespace

void decode_codes(Kind kind, const std::byte* stored, int64_t rows, int64_t cols, uint8_t* codes) {
  switch (kind) {
    case Kind::kPackedInt4:
      return decode_rows(stored, 4 * ceil_div(cols, kPerWord), rows, cols, codes);
    case Kind::kMxfp4:
    case Kind::kNvfp4:
      return decode_rows(stored, ceil_div(cols, 2), rows, cols, codes);
    case Kind::kAwq:
      return transpose_words(
          stored, cols, rows, kAwqOrder,
          [&](int64_t row, int64_t col, uint8_t code) { codes[row * cols + col] = code; });
    case Kind::kGptq:
      for (int64_t word = 0; word < cols / kPerWord; ++word) {
        for (int64_t r = 0; r < rows; ++r) {
          const uint32_t bits = word_at(stored, word * rows + r);
          for (int64_t k = 0; k < kPerWord; ++k) {
            codes[r * cols + word * kPerWord + k] = nibble(bits, k);
          }
        }
      }
      return;
    default:
      FATHOM_CHECK(false, "codes of kind {}", static_cast<int>(kind));
  }
}

void decode_zeros(const QuantizationConfig& quantization, const std::byte* stored, int64_t rows,
                  int64_t groups, uint8_t* zeros) {
  if (quantization.kind == Kind::kPackedInt4) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t g = 0; g < groups; ++g) {
        zeros[r * groups + g] = nibble(word_at(stored, r / kPerWord * groups + g), r % kPerWord);
      }
    }
    return;
  }
  // The first form's 15 stands for 0: the sum has four bits.
  const int shift = quantization.zeros_minus_one ? 1 : 0;
  transpose_words(stored, groups, rows, quantization.kind == Kind::kAwq ? kAwqOrder : kSequential,
                  [&](int64_t row, int64_t group, uint8_t zero) {
                    zeros[row * groups + group] = static_cast<uint8_t>((zero + shift) & 0xF);
                  });
}

Result<std::vector<int32_t>> decode_order(const std::byte* stored, int64_t cols, int64_t groups,
                                          int64_t group_cols, std::string_view where) {
  std::vector<int32_t> group_of(static_cast<size_t>(cols));
  std::memcpy(group_of.data(), stored, group_of.size() * sizeof(int32_t));
  std::vector<int64_t> sizes(static_cast<size_t>(groups));
  for (size_t c = 0; c < group_of.size(); ++c) {
    if (group_of[c] < 0 || group_of[c] >= groups) {
      return invalid("{}holds {} at index {}; there are {} groups", where, group_of[c], c, groups);
    }
    ++sizes[static_cast<size_t>(group_of[c])];
  }
  for (size_t g = 0; g < sizes.size(); ++g) {
    if (sizes[g] == group_cols) continue;
    return invalid("{}gives {} columns to group {}; quantization_config.group_size is {}", where,
                   sizes[g], g, group_cols);
  }
  std::vector<int32_t> columns;
  if (std::is_sorted(group_of.begin(), group_of.end())) return columns;
  columns.resize(group_of.size());
  std::iota(columns.begin(), columns.end(), 0);
  std::stable_sort(columns.begin(), columns.end(), [&](int32_t a, int32_t b) {
    return group_of[static_cast<size_t>(a)] < group_of[static_cast<size_t>(b)];
  });
  return columns;
}

float decode_scale(DType dtype, const std::byte* stored, int64_t index) {
  const auto load = [&](auto value) {
    std::memcpy(&value, stored + index * static_cast<int64_t>(sizeof value), sizeof value);
    return value;
  };
  switch (dtype) {
    case DType::kF32:
      return load(float{});
    case DType::kBF16:
      return to_float(load(bf16{}));
    case DType::kF16:
      return to_float(load(f16{}));
    case DType::kF8E4M3:
      return to_float(load(e4m3{}));
    default:
      return e8m0_to_float(load(uint8_t{}));
  }
}

}  // namespace fathom
