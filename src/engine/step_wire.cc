#include "engine/step_wire.h"

#define XXH_INLINE_ALL  // header only: nothing to link
#include <xxhash.h>

#include <algorithm>

#include "base/check.h"
#include "model/step_hash.h"

namespace fathom {
namespace {

// Least sizes of entries on the wire, with which their number is checked against what is there.
constexpr size_t kLaneBytes = 4, kRowBytes = 36, kTokenBytes = 16, kPairBytes = 8, kMoveBytes = 16,
                 kListBytes = 8;

// What a row has beside its numbers, as bits of one word.
constexpr uint32_t kHasOptions = 1, kHasHistory = 2;

// Calls visit(array) for each array of a batch, in one order for writing and reading.
template <typename Batch, typename Visit>
void for_each_array(Batch& batch, const Visit& visit) {
  visit(batch.token_ids);
  visit(batch.positions);
  visit(batch.query_start);
  visit(batch.context_lens);
  visit(batch.prompt_lens);
  visit(batch.block_tables);
  visit(batch.num_drafts);
  visit(batch.mtp_lens);
  visit(batch.logit_rows);
  visit(batch.largest_only);
}

void write_pairs(std::span<const std::pair<int32_t, float>> pairs, WireWriter& writer) {
  writer.u64(pairs.size());
  for (const auto& [id, value] : pairs) {
    writer.i32(id);
    writer.f32(value);
  }
}

void read_pairs(WireReader& reader, std::vector<std::pair<int32_t, float>>& pairs) {
  pairs.resize(reader.count(kPairBytes));
  for (auto& [id, value] : pairs) {
    id = reader.i32();
    value = reader.f32();
  }
}

void write_options(const SampleOptions& options, WireWriter& writer) {
  for (const double value :
       {options.temperature, options.top_p, options.min_p, options.repetition_penalty,
        options.presence_penalty, options.frequency_penalty}) {
    writer.f64(value);
  }
  writer.i64(options.top_k);
  writer.u64(options.seed);
  writer.u64(options.stream);
  write_pairs(options.logit_bias, writer);
}

void read_options(WireReader& reader, SampleOptions& options) {
  for (double* const value :
       {&options.temperature, &options.top_p, &options.min_p, &options.repetition_penalty,
        &options.presence_penalty, &options.frequency_penalty}) {
    *value = reader.f64();
  }
  options.top_k = reader.i64();
  options.seed = reader.u64();
  options.stream = reader.u64();
  read_pairs(reader, options.logit_bias);
}

// A history counts only with penalties.
bool needs_history(const SampleRow& row) {
  return row.history != nullptr && row.options != nullptr && row.options->has_penalties();
}

void write_row(const SampleRow& row, WireWriter& writer) {
  const bool has_history = needs_history(row);
  writer.u32((row.options != nullptr ? kHasOptions : 0) | (has_history ? kHasHistory : 0));
  writer.u64(row.position);
  writer.i32(row.num_logprobs);
  writer.i32(row.given_id);
  writer.array(row.masked);
  writer.array(row.allowed);
  if (row.options != nullptr) write_options(*row.options, writer);
  if (!has_history) return;
  writer.u64(row.history->entries().size());
  for (const SeenToken& seen : row.history->entries()) {
    writer.i32(seen.id);
    writer.i32(seen.output_count);
  }
}

void write_moves(std::span<const ExpertMove> moves, WireWriter& writer) {
  writer.u64(moves.size());
  for (const ExpertMove& move : moves) {
    writer.i64(move.layer);
    writer.u64(move.ranks.size());
    for (const auto& experts : move.ranks) writer.array(std::span<const int32_t>(experts));
  }
}

void read_moves(WireReader& reader, std::vector<ExpertMove>& moves) {
  moves.resize(reader.count(kMoveBytes));
  for (ExpertMove& move : moves) {
    move.layer = reader.i64();
    move.ranks.resize(reader.count(kListBytes));
    for (auto& experts : move.ranks) reader.array(experts);
  }
}

}  // namespace

std::vector<ExpertMove> moves_between(const ExpertTable& from, const ExpertTable& to) {
  std::vector<ExpertMove> moves;
  for (int64_t layer = 0; layer < to.num_layers(); ++layer) {
    RankLists ranks = to.lists_of(layer);
    if (ranks != from.lists_of(layer)) moves.push_back({layer, std::move(ranks)});
  }
  return moves;
}

Result<ExpertTable> apply_moves(const ExpertTable& from, std::span<const ExpertMove> moves) {
  ExpertLists lists = from.lists();
  for (const ExpertMove& move : moves) {
    if (move.layer < 0 || move.layer >= from.num_layers()) {
      return invalid("experts of layer {} move, there are {}", move.layer, from.num_layers());
    }
    lists[static_cast<size_t>(move.layer)] = move.ranks;
  }
  return ExpertTable::create(from.num_experts(), from.num_ranks(), lists, "experts move: ");
}

uint64_t plan_hash(const StepPart& part) {
  const auto add = [](uint64_t hash, const auto& number) {
    return XXH3_64bits_withSeed(&number, sizeof number, hash);
  };
  uint64_t hash = add(part.lanes.size(), part.experts);
  hash = add(hash, part.states.size());
  for (const ExpertMove& move : part.moves) {
    hash = add(hash, move.layer);
    for (const auto& experts : move.ranks) {
      hash = add(hash, experts.size());
      for (const int32_t expert : experts) hash = add(hash, expert);
    }
  }
  for (size_t lane = 0; lane < part.lanes.size(); ++lane) {
    if (part.has_lane[lane] == 0) continue;
    hash = hash_batch(part.lanes[lane], add(hash, lane));
    if (part.states.empty()) continue;
    hash = add(hash, part.states[lane].size());
    for (const int32_t state : part.states[lane]) hash = add(hash, state);
  }
  return hash;
}

void write_step(const StepPart& part, WireWriter& writer) {
  FATHOM_CHECK(part.lanes.size() == part.has_lane.size(), "{} lanes, {} of them assigned",
               part.lanes.size(), part.has_lane.size());
  FATHOM_CHECK(part.states.empty() || part.states.size() == part.lanes.size(),
               "{} lanes, states of {}", part.lanes.size(), part.states.size());
  writer.u32(static_cast<uint32_t>(part.states.empty() ? StepMessage::kStep : StepMessage::kDraft));
  writer.u64(part.id.epoch);
  writer.u64(part.id.number);
  writer.u64(plan_hash(part));
  writer.u64(part.experts);
  write_moves(part.moves, writer);
  writer.u64(part.lanes.size());
  for (size_t lane = 0; lane < part.lanes.size(); ++lane) {
    writer.u32(part.has_lane[lane]);
    if (part.has_lane[lane] == 0) continue;
    writer.i32(part.lanes[lane].max_pages);
    for_each_array(part.lanes[lane], [&](const std::vector<int32_t>& array) {
      writer.array(std::span<const int32_t>(array));
    });
    if (!part.states.empty()) writer.array(std::span<const int32_t>(part.states[lane]));
  }
  writer.u64(part.rows.size());
  for (const SampleRow& row : part.rows) write_row(row, writer);
}

void ReceivedStep::read_row(WireReader& reader, SampleRow& row, RowData& data) {
  const uint32_t has = reader.u32();
  row.position = reader.u64();
  row.num_logprobs = reader.i32();
  row.given_id = reader.i32();
  reader.array(data.masked);
  reader.array(data.allowed);
  row.masked = data.masked;
  row.allowed = data.allowed;
  if ((has & kHasOptions) != 0) {
    read_options(reader, data.options);
    row.options = &data.options;
  }
  if ((has & kHasHistory) == 0) return;
  data.history = TokenHistory();
  const size_t seen = reader.count(kPairBytes);
  for (size_t i = 0; i < seen; ++i) {
    const int32_t id = reader.i32();
    data.history.add({id, reader.i32()});
  }
  row.history = &data.history;
}

Result<> ReceivedStep::read(StepMessage kind, WireReader& reader) {
  drafts_ = kind == StepMessage::kDraft;
  id_.epoch = reader.u64();
  id_.number = reader.u64();
  const uint64_t hash = reader.u64();
  experts_ = reader.u64();
  read_moves(reader, moves_);
  const size_t num_lanes = reader.count(kLaneBytes);
  if (!reader.failed() && num_lanes != lanes_.size()) {
    return invalid("a step of {} lanes came, there are {}", num_lanes, lanes_.size());
  }
  for (size_t lane = 0; lane < num_lanes && !reader.failed(); ++lane) {
    has_lane_[lane] = reader.u32() != 0 ? 1 : 0;
    ForwardBatch& batch = lanes_[lane];
    batch.max_pages = has_lane_[lane] != 0 ? reader.i32() : 0;
    for_each_array(batch, [&](std::vector<int32_t>& array) {
      array.clear();
      if (has_lane_[lane] != 0) reader.array(array);
    });
    states_[lane].clear();
    if (drafts_ && has_lane_[lane] != 0) reader.array(states_[lane]);
    if (has_lane_[lane] == 0) batch.query_start.assign(1, 0);
  }
  rows_.assign(reader.count(kRowBytes), SampleRow());
  if (row_data_.size() < rows_.size()) row_data_.resize(rows_.size());
  for (size_t i = 0; i < rows_.size() && !reader.failed(); ++i) {
    rows_[i].row = static_cast<int64_t>(i);
    read_row(reader, rows_[i], row_data_[i]);
  }
  if (!reader.ended()) return invalid("what came is not a step");
  const uint64_t own = plan_hash({id_, experts_, moves_, lanes_, states(), has_lane_, {}});
  if (own != hash) {
    return invalid("the plan of step {} has hash {:016x} here, node 0 planned {:016x}", id_.number,
                   own, hash);
  }
  return {};
}

void write_result(const StepId& id, std::span<const SampledToken> tokens,
                  std::span<const int32_t> expert_counts, WireWriter& writer) {
  writer.u64(id.epoch);
  writer.u64(id.number);
  writer.u64(tokens.size());
  for (const SampledToken& token : tokens) {
    writer.i32(token.id);
    writer.f32(token.logprob);
    write_pairs(token.top, writer);
  }
  writer.array(expert_counts);
}

Result<> read_result(std::span<const std::byte> record, const StepId& id,
                     std::span<SampledToken> tokens, std::span<int32_t> expert_counts) {
  WireReader reader(record);
  StepId theirs;
  theirs.epoch = reader.u64();
  theirs.number = reader.u64();
  const size_t count = reader.count(kTokenBytes);
  if (!reader.failed() && theirs != id) {
    return invalid("results of step {} of epoch {:x} came, awaited are those of step {} of {:x}",
                   theirs.number, theirs.epoch, id.number, id.epoch);
  }
  if (!reader.failed() && count != tokens.size()) {
    return invalid("step {} has {} tokens, awaited are {}", id.number, count, tokens.size());
  }
  for (size_t i = 0; i < count && !reader.failed(); ++i) {
    tokens[i].id = reader.i32();
    tokens[i].logprob = reader.f32();
    read_pairs(reader, tokens[i].top);
  }
  const size_t num_counts = reader.count(sizeof(int32_t));
  if (!reader.failed() && num_counts != expert_counts.size()) {
    return invalid("step {} has {} experts' counts, awaited are {}", id.number, num_counts,
                   expert_counts.size());
  }
  for (size_t i = 0; i < num_counts && !reader.failed(); ++i) {
    expert_counts[i] = reader.i32();
    if (expert_counts[i] < 0) return invalid("an expert has {} tokens", expert_counts[i]);
  }
  if (!reader.ended()) return invalid("what came is not the result of a step");
  return {};
}

void write_page_copy(const PageCopy& copy, WireWriter& writer) {
  writer.u32(static_cast<uint32_t>(StepMessage::kCopyPage));
  for (const int32_t value : {copy.from_lane, copy.from_page, copy.to_lane, copy.to_page}) {
    writer.i32(value);
  }
}

Result<PageCopy> read_page_copy(WireReader& reader) {
  PageCopy copy;
  for (int32_t* const value : {&copy.from_lane, &copy.from_page, &copy.to_lane, &copy.to_page}) {
    *value = reader.i32();
  }
  if (!reader.ended()) return invalid("what came is not a page's copy");
  return copy;
}

}  // namespace fathom
