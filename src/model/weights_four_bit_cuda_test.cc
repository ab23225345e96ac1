// Loading four-bit weights onto the GPU: tiles of routed experts hold the host's codes and scales
// of the same checkpoint, all else its values in bf16.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "model/weight_trial_cuda.h"
#include "ops/moe/plans/four_bit_tiles.h"
#include "tensor/four_bit.h"

namespace fathom::cuda {
namespace {

constexpr const char* kInt4 =
    R"({"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "strategy": "group",
                                            "group_size": 32}}}})";
constexpr const char* kMxfp4 =
    R"({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "strategy": "group",
                                            "group_size": 32}}}})";

struct HostCodes {
  std::vector<uint8_t> codes = {};
  std::vector<float> scales = {}, values = {};
  int64_t cols = 0;
};

std::map<std::string, HostCodes> read_on_host(const Checkpoint& checkpoint, const ModelSpec& spec) {
  std::map<std::string, HostCodes> all;
  std::mutex mutex;
  std::vector<TensorRequest> requests;
  const auto add = [&](const TensorPart& part) {
    requests.push_back({part.name,
                        {part.num_rows, part.num_cols},
                        [&, name = part.name](const ScaledMatrix& matrix) -> Result<> {
                          HostCodes host{.cols = matrix.cols()};
                          for (int64_t r = 0; r < matrix.rows(); ++r) {
                            for (int64_t c = 0; c < matrix.cols(); ++c) {
                              host.codes.push_back(matrix.values.row<uint8_t>(r)[c]);
                              host.scales.push_back(matrix.scale_at(r, c));
                              host.values.push_back(matrix.at(r, c));
                            }
                          }
                          const std::scoped_lock lock(mutex);
                          all[name] = std::move(host);
                          return {};
                        }});
  };
  const LayerSpec& layer = spec.layers[1];
  add(layer.attention.o);
  for (const MlpSpec& expert : layer.moe->experts) {
    for (const TensorPart* part : {&expert.gate, &expert.up, &expert.down}) add(*part);
  }
  const auto loaded = load_tensors(checkpoint, requests, {.show_progress = false});
  FATHOM_CHECK(loaded.has_value(), "{}", loaded.error().message);
  return all;
}

enum class Of { kGate, kUp, kDown };

// `tiles`: an expert's matrix of `cols` columns; `rows` of the part's, padded.
void expect_tiles(const std::vector<uint8_t>& tiles, int64_t rows, int64_t cols, Of of,
                  const HostCodes& host, const TensorPart& part, int zero) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = of == Of::kDown ? r : four_bit_gate_up_row(r, of == Of::kUp);
    const int in_tile = static_cast<int>(row % kFourBitTileRows);
    for (int64_t c = 0; c < cols; ++c) {
      const int column = static_cast<int>(c % kFourBitBlockColumns);
      const int64_t tile = four_bit_tile_at(row, c, cols);
      const FourBitPlace place = four_bit_place(in_tile, column);
      uint32_t word = 0;
      std::memcpy(&word, tiles.data() + tile + place.at, 4);
      bf16 scale;
      std::memcpy(&scale, tiles.data() + tile + four_bit_scale_at(in_tile, column), 2);
      const bool exists = r < part.rows.count && c < part.cols.count;
      const auto at = static_cast<size_t>((part.rows.first + r) * host.cols + part.cols.first + c);
      ASSERT_EQ(word >> place.shift & 15, exists ? host.codes[at] : static_cast<uint8_t>(zero))
          << part.name << " " << r << ", " << c;
      // A group of padding alone has the scale 0.
      if (exists) {
        ASSERT_EQ(to_float(scale), host.scales[at]) << part.name << " " << r << ", " << c;
      }
      if (r >= part.rows.count) {
        ASSERT_EQ(scale.bits, 0) << part.name << " " << r << ", " << c;
      }
    }
  }
}

class FourBitWeights : public testing::TestWithParam<const char*> {};

TEST_P(FourBitWeights, TilesHoldTheHostsCodes) {
  const Sizes sizes = {.dense = 576, .width = 160};
  const TestFolder folder;
  folder.write("config.json", config_text(sizes, GetParam()));
  const auto checkpoint = Checkpoint::open_dummy(folder.path());
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const LoadOptions options = {.show_progress = false};
  for (const int ranks : {1, 2}) {
    for (int rank = 0; rank < ranks; ++rank) {
      const ModelSpec spec = make_spec(checkpoint->config(), {.tp = ranks}, rank);
      const auto host = read_on_host(*checkpoint, spec);
      const auto weights = load_rank(*checkpoint, spec, StoredFp8::kKept, options);
      ASSERT_TRUE(weights) << weights.error().message;
      const LayerWeights& layer = weights->layers[1];
      const int64_t wide = layer.experts.width, hidden = sizes.hidden;
      ASSERT_EQ(wide, ranks == 1 ? 192 : rank == 0 ? 128 : 64);
      ASSERT_EQ(layer.experts.gate_up.type, DType::kU8);
      const int zero = layer.experts.code == FourBitCode::kInteger ? kSymmetricZero : 0;
      const int64_t gate_up_bytes = four_bit_bytes(2 * wide, hidden),
                    down_bytes = four_bit_bytes(hidden, wide);
      for (size_t i = 0; i < spec.layers[1].moe->experts.size(); ++i) {
        const MlpSpec& expert = spec.layers[1].moe->experts[i];
        const auto at = static_cast<int64_t>(i);
        const auto gate_up = fetch<uint8_t>(
            static_cast<const std::byte*>(layer.experts.gate_up.values) + at * gate_up_bytes,
            gate_up_bytes);
        const auto down = fetch<uint8_t>(
            static_cast<const std::byte*>(layer.experts.down.values) + at * down_bytes, down_bytes);
        expect_tiles(gate_up, wide, hidden, Of::kGate, host.at(expert.gate.name), expert.gate,
                     zero);
        expect_tiles(gate_up, wide, hidden, Of::kUp, host.at(expert.up.name), expert.up, zero);
        expect_tiles(down, hidden, wide, Of::kDown, host.at(expert.down.name), expert.down, zero);
      }
      const TensorPart& o = spec.layers[1].attention.o;
      const Fetched device(layer.o, o.rows.count, o.cols.count);
      ASSERT_EQ(device.type, DType::kBF16);
      const HostCodes& host_o = host.at(o.name);
      for (int64_t r = 0; r < o.rows.count; ++r) {
        for (int64_t c = 0; c < o.cols.count; ++c) {
          const float value =
              host_o.values[static_cast<size_t>(r * host_o.cols + o.cols.first + c)];
          ASSERT_EQ(device.at(r, c), to_float(to_bf16(value))) << r << ", " << c;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Codes, FourBitWeights, testing::Values(kInt4, kMxfp4),
                         [](const auto& test) { return test.index == 0 ? "Int4" : "Mxfp4"; });

}  // namespace
}  // namespace fathom::cuda
