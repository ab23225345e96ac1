// A step on its way between processes: what node 0 sends to a node, and what comes back.
//
// A node gets the batches of the lanes that it has ranks of, the sample rows of those lanes whose
// first rank it has, and which experts move before the step. Records are little-endian
// (comm/wire.h); malformed ones are refused with kInvalidArgument and allocate no more than a small
// multiple of their length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "comm/wire.h"
#include "model/forward_batch.h"
#include "ops/sampling/sample.h"
#include "placement/expert_table.h"

namespace fathom {

// First word of each message of node 0 once the model is loaded; values are part of the protocol.
enum class StepMessage : uint32_t {
  kStep = 1,
  kCopyPage = 2,
  kDraft = 3,
};

// Which step, of which world.
struct StepId {
  uint64_t epoch = 0;   // of the world
  uint64_t number = 0;  // counts from 1, those of drafts too
  friend bool operator==(const StepId&, const StepId&) = default;
};

// Where a layer's experts are from this step on.
struct ExpertMove {
  int64_t layer = 0;  // as an ExpertTable counts
  RankLists ranks;
  friend bool operator==(const ExpertMove&, const ExpertMove&) = default;
};
// The layers of `to` that differ from `from`; and `from` with such layers. kInvalidArgument if that
// is no table.
std::vector<ExpertMove> moves_between(const ExpertTable& from, const ExpertTable& to);
Result<ExpertTable> apply_moves(const ExpertTable& from, std::span<const ExpertMove> moves);

// What a node gets of a step, or of one that drafts (Runner::draft_step()).
struct StepPart {
  StepId id = {};
  // ExpertTable::fingerprint() with the moves made; 0 where tokens are not exchanged.
  uint64_t experts = 0;
  std::span<const ExpertMove> moves = {};
  std::span<const ForwardBatch> lanes = {};  // [lanes of the world]
  // [lanes of the world], of a step that drafts; empty: it does not.
  std::span<const std::vector<int32_t>> states = {};
  std::span<const uint8_t> has_lane = {};  // [lanes]: 1 if the node has ranks of it, else 0
  // How to sample the logit rows of the lanes whose first rank the node has, in order.
  std::span<const SampleRow> rows = {};
};
// Appends the message with its plan hash.
void write_step(const StepPart& part, WireWriter& writer);

// A step as a node has received it. Owns what its rows point to; its memory is reused.
class ReceivedStep {
 public:
  explicit ReceivedStep(int num_lanes)
      : lanes_(static_cast<size_t>(num_lanes)),
        states_(static_cast<size_t>(num_lanes)),
        has_lane_(static_cast<size_t>(num_lanes)) {}

  // Reads what follows StepMessage::kStep, or kDraft. Fails if the record is malformed or has
  // another number of lanes, or if its plan hash is not that of what was read.
  Result<> read(StepMessage kind, WireReader& reader);

  const StepId& id() const { return id_; }
  uint64_t experts() const { return experts_; }
  std::span<const ExpertMove> moves() const { return moves_; }
  // [lanes of the world]; a lane of other nodes has no rows.
  std::span<const ForwardBatch> lanes() const { return lanes_; }
  // StepPart's.
  std::span<const std::vector<int32_t>> states() const {
    return std::span(states_).first(drafts_ ? states_.size() : 0);
  }
  std::span<const SampleRow> rows() const { return rows_; }

 private:
  struct RowData {
    SampleOptions options;
    TokenHistory history;
    std::vector<int32_t> masked;
    std::vector<uint32_t> allowed;
  };
  void read_row(WireReader& reader, SampleRow& row, RowData& data);

  StepId id_;
  uint64_t experts_ = 0;
  std::vector<ExpertMove> moves_;
  std::vector<ForwardBatch> lanes_;
  bool drafts_ = false;
  std::vector<std::vector<int32_t>> states_;
  std::vector<uint8_t> has_lane_;
  std::vector<SampleRow> rows_;
  std::vector<RowData> row_data_;  // [rows]
};

// A hash of the plan of a step as far as a node computes it: equal on node 0 and on the node.
uint64_t plan_hash(const StepPart& part);

// What a node has made of a step: the tokens of its rows, and the tokens that its ranks routed to
// each expert (empty where tokens are not exchanged). Values and bits of floats arrive unchanged.
void write_result(const StepId& id, std::span<const SampledToken> tokens,
                  std::span<const int32_t> expert_counts, WireWriter& writer);
// Overwrites `tokens` and `expert_counts`. Fails if the record is malformed, is of another step, or
// has not as many of each.
Result<> read_result(std::span<const std::byte> record, const StepId& id,
                     std::span<SampledToken> tokens, std::span<int32_t> expert_counts);

// A page's copy from one lane to another, in the order of the steps.
struct PageCopy {
  int32_t from_lane = 0, from_page = 0, to_lane = 0, to_page = 0;
  friend bool operator==(const PageCopy&, const PageCopy&) = default;
};
void write_page_copy(const PageCopy& copy, WireWriter& writer);
// Reads what follows StepMessage::kCopyPage.
Result<PageCopy> read_page_copy(WireReader& reader);

}  // namespace fathom
