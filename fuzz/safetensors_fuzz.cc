// What a checkpoint's small files can say: the first byte chooses the parser, the rest is its text.
// Whatever is accepted must also hold together: a header's tensors fit the data, a configuration's
// numbers can be multiplied.
#include <cstdint>
#include <string_view>

#include "base/check.h"
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

void run(std::string_view input) {
  if (input.empty()) return;
  const std::string_view text = input.substr(1);
  switch (input.front() % 4) {
    case 0:
      return fuzz_header(text);
    case 1:
      return fuzz_index(text);
    case 2:
      return fuzz_config(text);
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
