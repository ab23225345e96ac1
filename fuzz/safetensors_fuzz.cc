// What a checkpoint's small files can say: the first byte chooses the parser, the rest is its text.
// Whatever is accepted must also hold together: a header's tensors fit the data, a configuration's
// numbers can be multiplied.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "checkpoint/four_bit_decode.h"
#include "checkpoint/four_bit_layout.h"
#include "checkpoint/generation_config.h"
#include "checkpoint/model_config.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_index.h"
#include "checkpoint/weight_names.h"

namespace fathom {
namespace {

// The data's size is chosen by the second byte, so that headers of small tensors can be accepted.
void fuzz_header(std::string_view text) {
  if (text.empty()) return;
  const int64_t data_bytes = static_cast<unsigned char>(text.front());
  const auto header = parse_safetensors_header(text.substr(1), data_bytes, "fuzz.safetensors");
  if (!header) {
    FATHOM_CHECK(header.error().message.starts_with("fuzz.safetensors: "), "{}",
                 header.error().message);
    return;
  }
  int64_t sum = 0;
  for (const auto& [name, entry] : *header) {
    FATHOM_CHECK(0 <= entry.begin && entry.begin <= entry.end && entry.end <= data_bytes, "{}",
                 name);
    sum += entry.end - entry.begin;
  }
  FATHOM_CHECK(sum == data_bytes, "{} of {} bytes", sum, data_bytes);
}

void fuzz_index(std::string_view text) {
  const auto index = parse_safetensors_index(text, "index");
  if (!index) return;
  for (const auto& [name, shard] : *index) {
    FATHOM_CHECK(shard.find('/') == std::string::npos, "{}", shard);
  }
}

void fuzz_config(std::string_view text) {
  const auto config = parse_model_config(text, "config.json");
  if (!config) return;
  FATHOM_CHECK(config->softmax_scale() > 0, "{}", config->softmax_scale());
  const WeightNames names(*config);
  int left = 1000;  // a large model's list is long, not different
  names.for_each([&](const PublishedTensor& tensor) {
    FATHOM_CHECK(names.classify(tensor.name) == tensor.group, "{}", tensor.name);
    return --left > 0;
  });
}

// An order that is accepted is a permutation.
void fuzz_order(const std::byte* stored, int64_t cols) {
  auto columns = decode_order(stored, cols, cols / 16, 16, "fuzz: ");
  if (!columns) {
    FATHOM_CHECK(columns.error().message.starts_with("fuzz: "), "{}", columns.error().message);
    return;
  }
  std::ranges::sort(*columns);
  for (size_t i = 0; i < columns->size(); ++i) {
    FATHOM_CHECK((*columns)[i] == static_cast<int32_t>(i), "{} at {}", (*columns)[i], i);
  }
}

// Decodes four-bit tensors of any content: kind, sizes and group come from the first bytes, what is
// missing of a tensor's bytes is zero. Codes and zero points have four bits whatever is stored.
void fuzz_four_bits(std::string_view text) {
  using Kind = QuantizationConfig::Kind;
  if (text.size() < 4) return;
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  constexpr Kind kKinds[] = {Kind::kPackedInt4, Kind::kAwq, Kind::kGptq, Kind::kMxfp4,
                             Kind::kNvfp4};
  QuantizationConfig config;
  config.kind = kKinds[byte(0) % 5];
  config.symmetric = false;
  config.act_order = byte(2) >= 128;
  config.zeros_minus_one = byte(0) >= 128;
  config.group_cols = 16;
  const bool words = config.kind == Kind::kAwq || config.kind == Kind::kGptq;
  const int64_t rows = (1 + byte(1) % 40) * (words ? 8 : 1);
  const int64_t cols = 16 * (1 + byte(2) % 8);
  text.remove_prefix(3);
  for (const FourBitPart& part : four_bit_parts(config, rows, cols)) {
    int64_t bytes = size_of(part.dtype);
    for (const int64_t size : part.shape) bytes *= size;
    std::vector<std::byte> stored(static_cast<size_t>(bytes));
    const size_t given = std::min(stored.size(), text.size());
    std::memcpy(stored.data(), text.data(), given);
    text.remove_prefix(given);
    if (part.role == FourBitPart::Role::kCodes) {
      std::vector<uint8_t> codes(static_cast<size_t>(rows * cols), 0xFF);
      decode_codes(config.kind, stored.data(), rows, cols, codes.data());
      for (const uint8_t code : codes) FATHOM_CHECK(code < 16, "{}", code);
    } else if (part.role == FourBitPart::Role::kZeros) {
      std::vector<uint8_t> zeros(static_cast<size_t>(rows * cols / 16), 0xFF);
      decode_zeros(config, stored.data(), rows, cols / 16, zeros.data());
      for (const uint8_t zero : zeros) FATHOM_CHECK(zero < 16, "{}", zero);
    } else if (part.role == FourBitPart::Role::kOrder) {
      fuzz_order(stored.data(), cols);
    } else if (part.role == FourBitPart::Role::kScales) {
      for (int64_t i = 0; i < bytes / size_of(part.dtype); ++i) {
        (void)decode_scale(part.dtype, stored.data(), i);
      }
    }
  }
}

void run(std::string_view input) {
  if (input.empty()) return;
  const std::string_view text = input.substr(1);
  switch (input.front() % 5) {
    case 0:
      return fuzz_header(text);
    case 1:
      return fuzz_index(text);
    case 2:
      return fuzz_config(text);
    case 4:
      return fuzz_four_bits(text);
    default:
      (void)parse_generation_config(text, "generation_config.json", 1000);
  }
}

}  // namespace
}  // namespace fathom

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fathom::run({reinterpret_cast<const char*>(data), size});
  return 0;
}
