#include "engine/fake_runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "base/random.h"
#include "cache/latent_layout.h"

namespace fathom {
uint64_t FakeModel::extend(uint64_t prefix_hash, int32_t token) {
  return mix64(prefix_hash ^ static_cast<uint64_t>(token + 1));
}

void FakeModel::logits_after(uint64_t prefix_hash, std::vector<float>& logits) const {
  static const std::vector<int32_t> likely = fake_likely_ids();
  logits.resize(static_cast<size_t>(vocab_size));
  for (int64_t id = 0; id < vocab_size; ++id) {
    logits[id] = -12 + static_cast<float>(3 * random_uniform(prefix_hash, 1, id));
  }
  for (const int32_t id : likely) {
    logits[id] = static_cast<float>(4 * random_uniform(prefix_hash, 2, id));
  }
  logits[kFakeEos] -= 1.5f;
}

FakeRunner::FakeRunner(const FakeModel& model, int max_steps_in_flight)
    : LogitsRunner(max_steps_in_flight), model_(model) {
  for (int lane = 0; lane < model.num_lanes; ++lane) lanes_.emplace_back(model.num_pages, copies);
}

Result<ConstTensorView> FakeRunner::forward(std::span<const ForwardBatch> lanes) {
  ++step_;
  EXPECT_EQ(lanes.size(), lanes_.size());
  const auto has_rows = [](const ForwardBatch& batch) { return batch.num_rows() > 0; };
  EXPECT_TRUE(std::any_of(lanes.begin(), lanes.end(), has_rows));
  for (const ForwardBatch& batch : lanes) {
    if (has_rows(batch) && before_step) FATHOM_RETURN_IF_ERROR(before_step(batch));
  }
  logits_.clear();
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    check(lanes[lane]);
    write_rows(lanes[lane], lanes_[lane].cache);
    if (drafts.most > 0) write_mtp_rows(lanes[lane], lanes_[lane].cache);
    add_logits(lanes[lane], lanes_[lane].cache);
  }
  begun_steps_.push_back(step_);
  return ConstTensorView(logits_.data(),
                         {std::ssize(logits_) / model_.vocab_size, model_.vocab_size});
}

void FakeRunner::add_logits(const ForwardBatch& batch, const Cache& cache) {
  int64_t sequence = 0;
  for (const int32_t row : batch.logit_rows) {
    while (batch.query_start[sequence + 1] <= row) ++sequence;
    model_.logits_after(read_prefix(batch, cache, sequence, batch.positions[row]), row_);
    logits_.insert(logits_.end(), row_.begin(), row_.end());
  }
}

void FakeRunner::copy_page(int from_lane, int32_t from, int to_lane, int32_t to) {
  ASSERT_TRUE(can_copy);
  ASSERT_NE(from_lane, to_lane);
  ASSERT_TRUE(from >= 0 && from < model_.num_pages && to >= 0 && to < model_.num_pages);
  const Cell* const source = lanes_[static_cast<size_t>(from_lane)].cache.data() + from * kPageSize;
  std::copy_n(source, kPageSize,
              lanes_[static_cast<size_t>(to_lane)].cache.begin() + to * kPageSize);
}

Result<std::span<const SampledToken>> FakeRunner::finish() {
  auto tokens = LogitsRunner::finish();
  const int64_t step = begun_steps_.front();
  begun_steps_.pop_front();
  if (!before_finish) return tokens;
  if (const auto finished = before_finish(); !finished) {
    spoil(step);
    return tl::unexpected(finished.error());
  }
  return tokens;
}

// A failed step leaves arbitrary contents in the rows that it was to write.
void FakeRunner::spoil(int64_t step) {
  for (Lane& lane : lanes_) {
    for (Cell& cell : lane.cache) {
      if (cell.step == step) cell.token = cell.mtp_token = 299 - cell.token;
    }
  }
}

void FakeRunner::Transfer::save(int32_t page, std::byte* host, int32_t id) {
  std::memset(host, 0xA5, page_bytes());
  begin({.id = id, .page = cache_->data() + page * kPageSize, .host = host, .is_save = true});
}

void FakeRunner::Transfer::load(const std::byte* host, int32_t page, int32_t id) {
  Cell* const cells = cache_->data() + page * kPageSize;
  std::fill_n(cells, kPageSize, Cell{});
  begin({.id = id, .page = cells, .host = const_cast<std::byte*>(host)});
}

std::span<const std::byte> FakeRunner::Transfer::rows_in_place(int32_t page) const {
  if (copies_->late || copies_->fail_at > 0 || copies_->fail_every > 0) return {};
  return std::as_bytes(
      std::span(*cache_).subspan(static_cast<size_t>(page * kPageSize), kPageSize));
}

std::span<std::byte> FakeRunner::Transfer::memory_of(int32_t page) const {
  if (!copies_->lets_rows_land) return {};
  return std::as_writable_bytes(
      std::span(*cache_).subspan(static_cast<size_t>(page * kPageSize), kPageSize));
}

// Another runner, with steps of its own, may have written the rows.
void FakeRunner::Transfer::forget_steps(Cell* page) {
  for (int64_t i = 0; i < kPageSize; ++i) page[i].step = 0;
}

void FakeRunner::Transfer::begin(Copy copy) {
  ++num_begun_;
  if (copies_->count != nullptr) ++*copies_->count;
  copy.fails = num_begun_ == copies_->fail_at ||
               (copies_->fail_every > 0 && num_begun_ % copies_->fail_every == 0);
  begun_.push_back(copy);
}

void FakeRunner::Transfer::take_ended(std::vector<EndedCopy>& ended, bool wait) {
  ended.clear();
  if (copies_->late) std::shuffle(begun_.begin(), begun_.end(), random_);
  const auto is_over = [&](const Copy& copy) {
    const bool ends = !copies_->late || random_() % 4 == 0 || (wait && ended.empty());
    if (!ends) return false;
    ended.push_back({copy.id, !copy.fails});
    if (copy.fails) return true;
    if (copy.is_save) std::memcpy(copy.host, copy.page, page_bytes());
    if (!copy.is_save) std::memcpy(copy.page, copy.host, page_bytes());
    if (!copy.is_save) forget_steps(copy.page);
    return true;
  };
  std::erase_if(begun_, is_over);
}

void FakeRunner::check(const ForwardBatch& batch) {
  const int64_t sequences = batch.num_sequences();
  ASSERT_LE(batch.num_rows(), max_rows);
  ASSERT_LE(std::ssize(batch.logit_rows), max_logit_rows);
  ASSERT_EQ(std::ssize(batch.positions), batch.num_rows());
  ASSERT_EQ(std::ssize(batch.query_start), sequences + 1);
  ASSERT_EQ(batch.query_start.front(), 0);
  ASSERT_EQ(batch.query_start.back(), batch.num_rows());
  ASSERT_EQ(std::ssize(batch.block_tables), sequences * batch.max_pages);
  ASSERT_TRUE(std::is_sorted(batch.logit_rows.begin(), batch.logit_rows.end()));
  ASSERT_EQ(std::adjacent_find(batch.logit_rows.begin(), batch.logit_rows.end()),
            batch.logit_rows.end());
  for (int64_t s = 0; s < sequences; ++s) {
    const int32_t rows = batch.query_start[s + 1] - batch.query_start[s];
    ASSERT_GT(rows, 0);
    const int64_t pages = (batch.context_lens[s] + rows + kPageSize - 1) / kPageSize;
    for (int32_t p = 0; p < batch.max_pages; ++p) {
      const int32_t page = batch.block_tables[s * batch.max_pages + p];
      if (p < pages) {
        ASSERT_TRUE(page >= 0 && page < model_.num_pages);
      } else {
        ASSERT_EQ(page, -1) << "a page too many";
      }
    }
    for (int32_t i = 0; i < rows; ++i) {
      ASSERT_EQ(batch.positions[batch.query_start[s] + i], batch.context_lens[s] + i);
      ASSERT_LT(batch.context_lens[s] + i, model_.max_model_len);
    }
  }
}

size_t FakeRunner::cell_of(const ForwardBatch& batch, int64_t sequence, int32_t position) {
  const int64_t page = batch.block_tables[sequence * batch.max_pages + position / kPageSize];
  return static_cast<size_t>(page * kPageSize + position % kPageSize);
}

void FakeRunner::write_rows(const ForwardBatch& batch, Cache& cache) {
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    for (int32_t row = batch.query_start[s]; row < batch.query_start[s + 1]; ++row) {
      Cell& target = cache[cell_of(batch, s, batch.positions[row])];
      EXPECT_NE(target.step, step_) << "a cache row is written twice in one step";
      target.token = batch.token_ids[row];
      target.position = batch.positions[row];
      target.step = step_;
    }
  }
}

// A step's own rows of the MTP layer: of its tokens that are no drafts, from mtp_lens on.
void FakeRunner::write_mtp_rows(const ForwardBatch& batch, Cache& cache) {
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    const int32_t context = batch.context_lens[s], first = batch.query_start[s];
    const int32_t tokens = batch.query_start[s + 1] - first - batch.num_drafts[s];
    EXPECT_GE(tokens, 1);
    EXPECT_GE(batch.mtp_lens[s], context) << "tokens without an MTP row before the step";
    for (int32_t position = std::max(1, batch.mtp_lens[s]); position < context + tokens;
         ++position) {
      Cell& cell = cache[cell_of(batch, s, position)];
      cell.mtp_token = batch.token_ids[first + position - context];
      cell.mtp_position = position;
    }
  }
}

Result<ConstTensorView> FakeRunner::draft_logits(std::span<const ForwardBatch> lanes,
                                                 std::span<const std::vector<int32_t>> states) {
  EXPECT_EQ(lanes.size(), lanes_.size());
  EXPECT_EQ(states.size(), lanes_.size());
  logits_.clear();
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    EXPECT_LE(lanes[lane].num_rows(), max_rows);
    EXPECT_TRUE(states[lane].empty() || std::ssize(states[lane]) == lanes[lane].num_rows());
    write_draft_rows(lanes[lane], !states[lane].empty(), lanes_[lane].cache);
    add_draft_logits(lanes[lane], lanes_[lane].cache);
  }
  return ConstTensorView(logits_.data(),
                         {std::ssize(logits_) / model_.vocab_size, model_.vocab_size});
}

// The first rows of a draft are of tokens that the main model has computed, except the last. All
// tokens before it have their rows then.
void FakeRunner::write_draft_rows(const ForwardBatch& batch, bool from_states, Cache& cache) {
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    EXPECT_GE(batch.context_lens[s], 1) << "the first token has no row";
    EXPECT_LE(batch.query_start[s + 1] - batch.query_start[s], from_states ? 1 : kMaxDrafts + 1);
    for (int32_t row = batch.query_start[s]; row < batch.query_start[s + 1]; ++row) {
      const int32_t position = batch.positions[row];
      EXPECT_EQ(position, batch.context_lens[s] + row - batch.query_start[s]);
      Cell& cell = cache[cell_of(batch, s, position)];
      cell.mtp_token = batch.token_ids[row];
      cell.mtp_position = position;
    }
    if (from_states) continue;
    const int32_t newest = batch.positions[batch.query_start[s + 1] - 1];
    for (int32_t position = 1; position < newest; ++position) {
      const Cell& cell = cache[cell_of(batch, s, position)];
      EXPECT_EQ(cell.position, position) << "a token that the model has not computed";
      EXPECT_EQ(cell.mtp_position, position) << "a token without an MTP row";
      EXPECT_EQ(cell.mtp_token, cell.token) << "the MTP row of another token";
    }
  }
}

void FakeRunner::add_draft_logits(const ForwardBatch& batch, const Cache& cache) {
  static constexpr int32_t kAdversarial[] = {kFakeEos, 258, 'T', 'O', 'P', 'a', 'b', 'c', 298, 0};
  int64_t sequence = 0;
  for (const int32_t row : batch.logit_rows) {
    while (batch.query_start[sequence + 1] <= row) ++sequence;
    const int32_t position = batch.positions[row];
    const uint64_t hash = read_mtp_prefix(batch, cache, sequence, position);
    model_.logits_after(hash, row_);
    const bool is_wrong = drafts.kind == FakeDrafts::Kind::kWrong ||
                          (drafts.kind == FakeDrafts::Kind::kInTurns && position % 2 == 0);
    if (is_wrong) std::rotate(row_.begin(), row_.begin() + 1, row_.end());
    if (drafts.kind == FakeDrafts::Kind::kAdversarial) {
      row_[static_cast<size_t>(kAdversarial[hash % std::size(kAdversarial)])] += 100;
    }
    if (drafts.kind == FakeDrafts::Kind::kRepeating) row_['a'] += 100;
    logits_.insert(logits_.end(), row_.begin(), row_.end());
  }
}

uint64_t FakeRunner::read_mtp_prefix(const ForwardBatch& batch, const Cache& cache,
                                     int64_t sequence, int32_t position) {
  uint64_t hash = FakeModel::extend(0, cache[cell_of(batch, sequence, 0)].token);
  for (int32_t i = 1; i <= position; ++i) {
    const Cell& cell = cache[cell_of(batch, sequence, i)];
    EXPECT_EQ(cell.mtp_position, i) << "an MTP row holds another position";
    hash = FakeModel::extend(hash, cell.mtp_token);
  }
  return hash;
}

uint64_t FakeRunner::read_prefix(const ForwardBatch& batch, const Cache& cache, int64_t sequence,
                                 int32_t position) {
  uint64_t hash = 0;
  for (int32_t i = 0; i <= position; ++i) {
    const Cell& source = cache[cell_of(batch, sequence, i)];
    EXPECT_EQ(source.position, i) << "a cache row holds another position";
    hash = FakeModel::extend(hash, source.token);
  }
  return hash;
}

}  // namespace fathom
