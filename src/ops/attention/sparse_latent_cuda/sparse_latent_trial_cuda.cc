#include "ops/attention/sparse_latent_cuda/sparse_latent_trial_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "base/math.h"
#include "cache/latent_row.h"
#include "device/cuda/device_array.h"
#include "device/cuda/graph.h"
#include "device/cuda/random_data.h"
#include "ops/attention/latent_decode_cuda/latent_decode_cuda.h"
#include "ops/attention/sparse_attention.h"
#include "ops/attention/sparse_latent_cuda/sparse_latent_attention_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kLatent = 512, kRope = 64, kColumns = kLatent + kRope;
constexpr int64_t kLayers = 3, kLayer = 1, kTailBytes = 176;
constexpr int32_t kUnreadable = 2147480000;
constexpr float kScale = 0.0721688f;  // 1 / sqrt(192)

// `count` ascending positions below `length`.
std::vector<int32_t> choose_keys(int32_t length, int32_t count, std::mt19937& random) {
  std::vector<int32_t> all(static_cast<size_t>(std::max(length, 0))), chosen;
  std::iota(all.begin(), all.end(), 0);
  std::ranges::sample(all, std::back_inserter(chosen), count, random);
  return chosen;
}

}  // namespace

SparseLatentTrial::SparseLatentTrial(const SparseTrialShape& shape) : shape_(shape) {
  std::mt19937 random(shape.seed);
  const auto sequences = std::ssize(shape.sequence_lens);
  for (const int32_t len : shape.sequence_lens) {
    const auto pages = static_cast<int32_t>(ceil_div(len, kPageSize));
    max_pages_ = std::max(max_pages_, pages);
    num_pages_ += pages;
  }
  std::vector<int32_t> pages(static_cast<size_t>(num_pages_));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), random);
  tables_.assign(static_cast<size_t>(sequences * max_pages_), kUnreadable);
  for (int64_t s = 0, next = 0; s < sequences; ++s) {
    const int64_t its = ceil_div(shape.sequence_lens[static_cast<size_t>(s)], kPageSize);
    std::copy_n(pages.begin() + next, its, tables_.begin() + s * max_pages_);
    next += its;
  }
  memory_.assign(static_cast<size_t>(num_pages_ * page_stride()), std::byte{0xFF});
  decoded_.assign(static_cast<size_t>(num_pages_ * kPageSize * kColumns), std::nanf(""));
  for (int32_t s = 0; s < sequences; ++s) {
    for (int32_t key = 0; key < shape.sequence_lens[static_cast<size_t>(s)]; ++key) {
      auto row = random_f32(kColumns, 0.6f, random);
      for (int64_t i = 0; i < kLatent; ++i) {
        row[static_cast<size_t>(i)] *= 0.25f + 0.25f * static_cast<float>((key + i / 128) % 5);
      }
      store(place_of(s, key), row.data());
    }
  }
  const int64_t heads = rows() * shape.heads;
  q_latent_ = random_bf16(heads * kLatent, 0.6f, random);
  q_rope_ = random_bf16(heads * kRope, 0.6f, random);
  keys_.assign(static_cast<size_t>(rows() * shape.top_k), kUnreadable);
  for (int64_t r = 0; r < rows(); ++r) {
    const SparseRow& row = shape.rows[static_cast<size_t>(r)];
    std::ranges::copy(choose_keys(row.length, count_of(r), random),
                      keys_.begin() + r * shape.top_k);
  }
}

int64_t SparseLatentTrial::page_stride() const {
  return kLayers * layout().page_bytes() + kTailBytes;
}

int64_t SparseLatentTrial::place_of(int32_t sequence, int32_t key) const {
  const int64_t entry = int64_t{sequence} * max_pages_ + key / kPageSize;
  return tables_[static_cast<size_t>(entry)] * kPageSize + key % kPageSize;
}

std::byte* SparseLatentTrial::row_at(int64_t place) {
  return memory_.data() + place / kPageSize * page_stride() + kLayer * layout().page_bytes() +
         place % kPageSize * layout().row_bytes();
}

void SparseLatentTrial::store(int64_t place, const float* values) {
  float* const decoded = decoded_.data() + place * kColumns;
  encode_row(layout(), values, values + kLatent, row_at(place));
  decode_row(layout(), row_at(place), decoded, decoded + kLatent);
}

int32_t SparseLatentTrial::count_of(int64_t row) const {
  return std::max(0, std::min(shape_.rows[static_cast<size_t>(row)].length, shape_.top_k));
}

void SparseLatentTrial::scale_keys(int32_t n, float factor) {
  for (int32_t s = 0; s < std::ssize(shape_.sequence_lens); ++s) {
    for (int32_t key = n - 1; key < shape_.sequence_lens[static_cast<size_t>(s)]; key += n) {
      const float* const decoded = decoded_.data() + place_of(s, key) * kColumns;
      std::vector<float> row(decoded, decoded + kColumns);
      for (int64_t i = 0; i < kLatent; ++i) row[static_cast<size_t>(i)] *= factor;
      store(place_of(s, key), row.data());
    }
  }
}

void SparseLatentTrial::scale_queries(float factor) {
  for (auto* q : {&q_latent_, &q_rope_}) {
    for (uint16_t& value : *q) value = bf16_bits(from_bf16(value) * factor);
  }
}

// Device memory of a launch over some rows.
class SparseLatentLaunch {
 public:
  SparseLatentLaunch(const SparseLatentTrial& trial, const std::vector<int32_t>& which)
      : trial_(trial),
        rows_(std::ssize(which)),
        memory_(trial.memory_),
        tables_(trial.tables_),
        out_(rows_ * trial.shape_.heads * kLatent),
        lse_(rows_ * trial.shape_.heads),
        scratch_(std::max<int64_t>(
            1, sparse_latent_scratch_words(rows_, trial.shape_.heads, trial.shape_.top_k,
                                           trial.shape_.split_keys))) {
    const int64_t heads = trial.shape_.heads, top_k = trial.shape_.top_k;
    std::vector<uint16_t> q_latent, q_rope;
    std::vector<int32_t> keys, sequences;
    const auto append = [](auto& to, const auto& from, int64_t row, int64_t width) {
      to.insert(to.end(), from.begin() + row * width, from.begin() + (row + 1) * width);
    };
    for (const int32_t row : which) {
      append(q_latent, trial.q_latent_, row, heads * kLatent);
      append(q_rope, trial.q_rope_, row, heads * kRope);
      append(keys, trial.keys_, row, top_k);
      sequences.push_back(trial.shape_.rows[static_cast<size_t>(row)].sequence);
      lengths.push_back(trial.shape_.rows[static_cast<size_t>(row)].length);
    }
    q_latent_ = DeviceArray<uint16_t>(q_latent);
    q_rope_ = DeviceArray<uint16_t>(q_rope);
    keys_ = DeviceArray<int32_t>(keys);
    sequences_ = DeviceArray<int32_t>(sequences);
    lengths_ = DeviceArray<int32_t>(lengths);
  }

  void enqueue(cudaStream_t stream) const {
    const SparseTrialShape& shape = trial_.shape_;
    sparse_latent_attention(DeviceContext::current().num_multiprocessors(),
                            {.rows = rows_,
                             .q_latent = q_latent_.data(),
                             .q_rope = q_rope_.data(),
                             .pages = memory_.data() + kLayer * trial_.layout().page_bytes(),
                             .page_stride = trial_.page_stride(),
                             .block_tables = tables_.data(),
                             .max_pages = trial_.max_pages_,
                             .sequences = sequences_.data(),
                             .lengths = lengths_.data(),
                             .keys = keys_.data(),
                             .top_k = shape.top_k,
                             .out = out_.data(),
                             .lse = lse_.data(),
                             .heads = shape.heads,
                             .softmax_scale = kScale,
                             .split_keys = shape.split_keys,
                             .scratch = scratch_.data(),
                             .format = shape.format},
                            stream);
  }

  void poison() const {
    check(cudaMemset(out_.data(), 0xFF, out_.bytes()), "poison");
    check(cudaMemset(lse_.data(), 0xFF, lse_.bytes()), "poison");
    check(cudaMemset(scratch_.data(), 0xFF, scratch_.bytes()), "poison");
  }
  void set_lengths(const std::vector<int32_t>& its) { lengths_.copy_from(its); }

  SparseTrialResult result() const {
    check(cudaDeviceSynchronize(), "synchronize");
    SparseTrialResult result{.out = out_.to_host(), .lse = lse_.to_host()};
    const int64_t heads = trial_.shape_.heads;
    for (int64_t r = 0; r < rows_; ++r) {
      if (lengths[static_cast<size_t>(r)] > 0) continue;
      const auto row = result.out.begin() + r * heads * kLatent;
      EXPECT_EQ(std::count(row, row + heads * kLatent, 0xFFFF), heads * kLatent)
          << "row " << r << " is unused";
      const auto its_lse = result.lse.begin() + r * heads;
      EXPECT_TRUE(std::all_of(its_lse, its_lse + heads, [](float x) { return std::isnan(x); }));
      std::fill_n(its_lse, heads, 0.0f);  // comparable
    }
    return result;
  }

  std::vector<int32_t> lengths;

 private:
  const SparseLatentTrial& trial_;
  const int64_t rows_;
  DeviceArray<std::byte> memory_;
  DeviceArray<int32_t> tables_;
  DeviceArray<uint16_t> q_latent_, q_rope_;
  DeviceArray<int32_t> keys_, sequences_, lengths_;
  DeviceArray<uint16_t> out_;
  DeviceArray<float> lse_, scratch_;
};

SparseTrialResult SparseLatentTrial::on_gpu(const std::vector<int32_t>& which, int launches) const {
  const SparseLatentLaunch launch(*this, which);
  SparseTrialResult first;
  for (int i = 0; i < launches; ++i) {
    launch.poison();
    launch.enqueue(nullptr);
    const SparseTrialResult result = launch.result();
    if (i == 0) first = result;
    EXPECT_TRUE(result == first) << "launch " << i;
  }
  return first;
}

SparseTrialResult SparseLatentTrial::on_gpu(int launches) const {
  std::vector<int32_t> all(static_cast<size_t>(rows()));
  std::iota(all.begin(), all.end(), 0);
  return on_gpu(all, launches);
}

SparseTrialResult SparseLatentTrial::in_graph() const {
  std::vector<int32_t> all(static_cast<size_t>(rows()));
  std::iota(all.begin(), all.end(), 0);
  SparseLatentLaunch launch(*this, all);
  const std::vector<int32_t> lengths = launch.lengths;
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
  launch.set_lengths(std::vector<int32_t>(all.size(), 0));
  launch.poison();
  const Graph graph(stream, [&] { launch.enqueue(stream); });
  graph.launch(stream);
  check(cudaStreamSynchronize(stream), "synchronize");
  launch.set_lengths(lengths);
  graph.launch(stream);
  check(cudaStreamSynchronize(stream), "synchronize");
  SparseTrialResult result = launch.result();
  check(cudaStreamDestroy(stream), "destroying a stream");
  return result;
}

std::vector<float> SparseLatentTrial::on_cpu(std::vector<float>& lse) const {
  ThreadPool pool(0);
  const Stream stream(pool);
  const int64_t heads = shape_.heads;
  std::vector<float> q_latent = widen(q_latent_), q_rope = widen(q_rope_),
                     out(static_cast<size_t>(rows() * heads * kLatent)), decoded = decoded_;
  lse.assign(static_cast<size_t>(rows() * heads), 0);
  std::vector<SparseRow> used;
  std::vector<int32_t> keys;
  for (int64_t r = 0; r < rows(); ++r) {
    SparseRow row = shape_.rows[static_cast<size_t>(r)];
    if (row.length <= 0) continue;
    row.row = static_cast<int32_t>(r);
    used.push_back(row);
    keys.insert(keys.end(), keys_.begin() + r * shape_.top_k,
                keys_.begin() + (r + 1) * shape_.top_k);
  }
  const LatentPages pages{
      {.format = CacheFormat::kF32}, reinterpret_cast<std::byte*>(decoded.data()), num_pages_};
  std::vector<std::byte> workspace(static_cast<size_t>(
      sparse_attention_workspace_bytes(std::ssize(used), heads, kLatent, pool.num_threads())));
  sparse_attention(stream, ConstTensorView(q_latent.data(), {rows(), heads, kLatent}),
                   ConstTensorView(q_rope.data(), {rows(), heads, kRope}),
                   PagedBatch{{}, {}, tables_, max_pages_}, used,
                   ConstTensorView(keys.data(), {std::ssize(used), shape_.top_k}), pages, kScale,
                   TensorView(out.data(), {rows(), heads, kLatent}),
                   TensorView(lse.data(), {rows(), heads}), workspace);
  return out;
}

const float* SparseLatentTrial::values_of(int64_t row, int32_t entry) const {
  const int32_t key = keys_[static_cast<size_t>(row * shape_.top_k + entry)];
  return decoded_.data() + place_of(shape_.rows[static_cast<size_t>(row)].sequence, key) * kColumns;
}

double SparseLatentTrial::scores_of(int64_t at, std::vector<double>& scores) const {
  const int64_t row = at / shape_.heads;
  const auto q_latent = std::span(q_latent_).subspan(static_cast<size_t>(at * kLatent), kLatent);
  const auto q_rope = std::span(q_rope_).subspan(static_cast<size_t>(at * kRope), kRope);
  double most = 0;
  for (int32_t i = 0; i < count_of(row); ++i) {
    const DoubleScore score = score_in_double(q_latent, q_rope, values_of(row, i));
    scores.push_back(score.value * kScale);
    most = std::max(most, score.magnitude * kScale);
  }
  return most;
}

std::vector<ScoreCertainty> SparseLatentTrial::certainties() const {
  std::vector<ScoreCertainty> all;
  for (int64_t at = 0; at < rows() * shape_.heads; ++at) {
    std::vector<double> scores;
    const double magnitude = scores_of(at, scores);
    all.push_back(certainty_of(scores, magnitude, kScoreResolution));
  }
  return all;
}

std::vector<double> SparseLatentTrial::in_double(std::vector<double>& lse) const {
  const int64_t heads = shape_.heads;
  std::vector<double> out(static_cast<size_t>(rows() * heads * kLatent));
  lse.assign(static_cast<size_t>(rows() * heads), 0);
  for (int64_t at = 0; at < rows() * heads; ++at) {
    std::vector<double> scores;
    scores_of(at, scores);
    if (scores.empty()) continue;
    const double most = *std::max_element(scores.begin(), scores.end());
    double all = 0;
    for (double& score : scores) all += score = std::exp(score - most);
    lse[static_cast<size_t>(at)] = most + std::log(all);
    for (int32_t i = 0; i < std::ssize(scores); ++i) {
      const double weight = scores[static_cast<size_t>(i)] / all;
      const float* const values = values_of(at / heads, i);
      for (int64_t c = 0; c < kLatent; ++c) {
        out[static_cast<size_t>(at * kLatent + c)] += weight * values[c];
      }
    }
  }
  return out;
}

std::vector<uint16_t> SparseLatentTrial::dense_on_gpu() const {
  const int processors = DeviceContext::current().num_multiprocessors();
  const int64_t page_bytes = layout().page_bytes();
  std::vector<std::byte> pages(static_cast<size_t>(num_pages_ * page_bytes));
  for (int64_t page = 0; page < num_pages_; ++page) {
    std::copy_n(memory_.begin() + page * page_stride() + kLayer * page_bytes, page_bytes,
                pages.begin() + page * page_bytes);
  }
  std::vector<int32_t> query_start = {0}, context_lens, sequences;
  for (const int32_t len : shape_.sequence_lens) {
    sequences.push_back(query_start.back());
    query_start.push_back(query_start.back() + 1);
    context_lens.push_back(len - 1);
  }
  const auto plan = plan_latent_decode({query_start, context_lens, tables_, max_pages_}, sequences,
                                       shape_.heads, processors);
  const DeviceArray<uint16_t> q_latent(q_latent_), q_rope(q_rope_), out(std::ssize(q_latent_));
  const DeviceArray<std::byte> its_pages(pages);
  const DeviceArray<int32_t> tables(tables_), first_part(plan.first_part);
  const DeviceArray<LatentDecodePart> parts(plan.parts);
  const DeviceArray<float> scratch(latent_decode_scratch(processors).words());
  prepare_latent_decode_scratch(scratch.data(), processors, nullptr);
  check(cudaMemset(out.data(), 0xFF, out.bytes()), "poison");
  latent_decode(plan.tile_rows, processors,
                {.rows = rows(),
                 .q_latent = q_latent.data(),
                 .q_rope = q_rope.data(),
                 .pages = its_pages.data(),
                 .num_pages = num_pages_,
                 .block_tables = tables.data(),
                 .out = out.data(),
                 .heads = shape_.heads,
                 .softmax_scale = kScale,
                 .parts = parts.data(),
                 .first_part = first_part.data(),
                 .scratch = scratch.data(),
                 .format = shape_.format},
                nullptr);
  check(cudaDeviceSynchronize(), "synchronize");
  return out.to_host();
}

double relative_error(std::span<const uint16_t> actual, std::span<const double> expected) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const float its = from_bf16(actual[i]);
    if (!std::isfinite(its)) return std::numeric_limits<double>::quiet_NaN();
    error += (its - expected[i]) * (its - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(error / norm);
}

double worst_certain_error(const SparseTrialResult& actual, const std::vector<double>& expected,
                           const std::vector<ScoreCertainty>& certainties) {
  double worst = 0;
  for (size_t at = 0; at < certainties.size(); ++at) {
    if (!certainties[at].is_certain) continue;
    constexpr auto kWidth = static_cast<size_t>(kLatent);
    const double error = relative_error(std::span(actual.out).subspan(at * kWidth, kWidth),
                                        std::span(expected).subspan(at * kWidth, kWidth));
    if (std::isnan(error)) return error;
    worst = std::max(worst, error);
  }
  return worst;
}

double worst_row_error(const SparseLatentTrial& trial, const SparseTrialResult& actual,
                       const std::vector<double>& expected) {
  const auto width = static_cast<size_t>(trial.shape().heads * kLatent);
  double worst = 0;
  for (int64_t r = 0; r < trial.rows(); ++r) {
    if (trial.shape().rows[static_cast<size_t>(r)].length <= 0) continue;
    const size_t first = static_cast<size_t>(r) * width;
    const double error = relative_error(std::span(actual.out).subspan(first, width),
                                        std::span(expected).subspan(first, width));
    if (std::isnan(error)) return error;
    worst = std::max(worst, error);
  }
  return worst;
}

}  // namespace fathom::cuda
