// A rank's weights on the GPU are slices of the whole model's, from files and with dummy weights.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "model/weight_trial_cuda.h"

namespace fathom::cuda {
namespace {

LoadOptions quiet() {
  LoadOptions options;
  options.show_progress = false;
  return options;
}

// Rows and columns of a matrix in device memory, and where they lie in another one.
struct Block {
  int64_t rows = 0, cols = 0;  // of the slice
  int64_t whole_rows = 0, whole_cols = 0;
  int64_t from_row = 0, from_col = 0;    // of the whole
  int64_t at_row = 0;                    // of the part
  int64_t part_rows = 0, part_cols = 0;  // of the part, with padding; 0: none beyond the slice
};

class Slices {
 public:
  Slices(const Checkpoint& checkpoint, int ranks, int rank, StoredFp8 stored_fp8)
      : config_(checkpoint.config()), spec_(make_spec(config_, {.tp = ranks}, rank)) {
    whole_ = *load_whole(checkpoint, stored_fp8, quiet());
    part_ = *load_rank(checkpoint, spec_, stored_fp8, quiet());
  }

  void all() const {
    const Slice vocabulary = spec_.vocabulary();
    table(part_.embedding, whole_.embedding, vocabulary, "embedding");
    table(part_.head, whole_.head, vocabulary, "head");
    for (size_t i = 0; i < part_.layers.size(); ++i) {
      attention(spec_.layers[i].attention, part_.layers[i], whole_.layers[i]);
      feed_forward(spec_.layers[i], part_.layers[i], whole_.layers[i]);
    }
  }

 private:
  // Compares a slice's values; a type that a slice does not keep is rounded to bf16.
  static void equal(const WeightMatrix& part, const WeightMatrix& whole, const Block& block,
                    const std::string& name) {
    const int64_t part_rows = block.part_rows > 0 ? block.part_rows : block.rows;
    const Fetched have(part, part_rows, block.part_cols > 0 ? block.part_cols : block.cols);
    const Fetched want(whole, block.whole_rows, block.whole_cols);
    int64_t wrong = 0;
    for (int64_t r = 0; r < block.rows; ++r) {
      for (int64_t c = 0; c < block.cols; ++c) {
        float value = want.at(block.from_row + r, block.from_col + c);
        if (part.type == DType::kBF16) value = to_float(to_bf16(value));
        wrong += have.at(block.at_row + r, c) != value;
      }
    }
    EXPECT_EQ(wrong, 0) << name;
  }

  void table(bf16* part, bf16* whole, Slice rows, const std::string& name) const {
    equal({.values = part}, {.values = whole},
          {.rows = rows.count,
           .cols = config_.hidden,
           .whole_rows = config_.vocab_size,
           .whole_cols = config_.hidden,
           .from_row = rows.first},
          name);
  }

  void attention(const AttentionSpec& spec, const LayerWeights& part,
                 const LayerWeights& whole) const {
    const int64_t all = config_.num_heads, heads = spec.heads.count, first = spec.heads.first;
    const int64_t latent = config_.kv_lora_rank, nope = config_.qk_nope_dim, v = config_.v_dim;
    const auto by_heads = [&](int64_t rows, int64_t cols) {
      return Block{.rows = heads * rows,
                   .cols = cols,
                   .whole_rows = all * rows,
                   .whole_cols = cols,
                   .from_row = first * rows};
    };
    equal(part.q_b, whole.q_b, by_heads(config_.qk_dim(), config_.q_lora_rank), "q_b");
    equal(part.kv_b, whole.kv_b, by_heads(nope + v, latent), "kv_b");
    equal(part.uk, whole.uk, by_heads(latent, nope), "uk");
    equal(part.uv, whole.uv, by_heads(v, latent), "uv");
    equal(part.o, whole.o,
          {.rows = config_.hidden,
           .cols = heads * v,
           .whole_rows = config_.hidden,
           .whole_cols = all * v,
           .from_col = first * v},
          "o");
    const int64_t q_kv_a = config_.q_lora_rank + config_.latent_dim();
    equal(part.q_kv_a, whole.q_kv_a,
          {.rows = q_kv_a,
           .cols = config_.hidden,
           .whole_rows = q_kv_a,
           .whole_cols = config_.hidden},
          "q_kv_a");
  }

  void blocks(const MlpWeights& part, const MlpWeights& whole, Slice inner, int64_t count,
              const std::string& name) const {
    if (inner.count == 0) {
      EXPECT_EQ(part.width, 0) << name;
      return;
    }
    const int64_t hidden = config_.hidden;
    for (int64_t i = 0; i < 2 * count; ++i) {  // gate and up in turn
      equal(part.gate_up, whole.gate_up,
            {.rows = inner.count,
             .cols = hidden,
             .whole_rows = 2 * count * whole.width,
             .whole_cols = hidden,
             .from_row = i * whole.width + inner.first,
             .at_row = i * part.width,
             .part_rows = 2 * count * part.width},
            fmt::format("{} gate_up {}", name, i));
    }
    equal(part.down, whole.down,
          {.rows = count * hidden,
           .cols = inner.count,
           .whole_rows = count * hidden,
           .whole_cols = whole.width,
           .from_col = inner.first,
           .part_cols = part.width},
          name + " down");
  }

  void feed_forward(const LayerSpec& spec, const LayerWeights& part,
                    const LayerWeights& whole) const {
    if (spec.dense) return blocks(part.dense, whole.dense, spec.dense->gate.rows, 1, "dense");
    blocks(part.experts, whole.experts, spec.moe->experts.front().gate.rows, config_.num_experts,
           "experts");
    blocks(part.shared, whole.shared, spec.moe->shared->gate.rows, 1, "shared");
  }

  const ModelConfig config_;
  const ModelSpec spec_;
  ModelWeights whole_, part_;
};

// Dense columns of 5 blocks, the last of them partial, and 3 heads: uneven over 2 and 3 ranks.
constexpr Sizes kUneven{.dense = 584, .width = 384, .heads = 3, .v = 128};
// Two blocks of an expert's columns over 3 ranks, of which two have half a block. Per-row scales
// would become other block-wise ones there.
constexpr Sizes kCut{.dense = 584, .width = 256, .heads = 3, .v = 128};

void compare(const Checkpoint& checkpoint) {
  for (const int ranks : {2, 3}) {
    for (int rank = 0; rank < ranks; ++rank) {
      const testing::ScopedTrace trace(__FILE__, __LINE__, fmt::format("rank {}/{}", rank, ranks));
      Slices(checkpoint, ranks, rank, StoredFp8::kKept).all();
      Slices(checkpoint, ranks, rank, StoredFp8::kExpandedToBF16).all();
    }
  }
}

TEST(WeightSlices, FromFiles) {
  for (const char* form : {"", kBlocks, kTensorStatic, kRow}) {
    const TestFolder folder;
    compare(write_checkpoint(folder, config_text(kUneven, form)));
  }
}

TEST(WeightSlices, OfCutBlocks) {
  for (const char* form : {"", kBlocks, kTensorStatic}) {
    const TestFolder folder;
    compare(write_checkpoint(folder, config_text(kCut, form)));
  }
}

TEST(WeightSlices, MadeUp) {
  for (const char* form : {"", kBlocks}) {
    const TestFolder folder;
    folder.write("config.json", config_text(kUneven, form));
    const auto checkpoint = Checkpoint::open_dummy(folder.path());
    ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
    compare(*checkpoint);
  }
}

}  // namespace
}  // namespace fathom::cuda
