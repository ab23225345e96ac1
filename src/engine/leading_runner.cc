#include "engine/leading_runner.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/check.h"

namespace fathom {

LeadingRunner::LeadingRunner(std::unique_ptr<NodeWorld> nodes, std::unique_ptr<Runner> own,
                             const Placement& placement, const ExpertBalancerOptions& balancer)
    : nodes_(std::move(nodes)), own_(std::move(own)), placement_(placement) {
  const WorldLayout& layout = world().layout();
  FATHOM_CHECK(world().is_leader() && layout.size() == placement.world(),
               "node {} of {} ranks leads {}", layout.node_rank, layout.size(), placement.world());
  parts_.resize(static_cast<size_t>(layout.nnodes()));
  for (int node = 0; node < layout.nnodes(); ++node) {
    parts_[static_cast<size_t>(node)].lanes = lanes_of_node(layout, node, placement);
  }
  ExpertRanks* const experts = own_->expert_ranks();
  if (experts == nullptr) return;
  ExpertBalancerOptions by_layer = balancer;
  by_layer.layers_a_step = 1;  // nodes read what moves to them
  balancer_ = std::make_unique<ExpertBalancer>(experts->expert_table(), placement.redundant_experts,
                                               by_layer);
  const ExpertTable& table = *experts->expert_table();
  expert_counts_.resize(static_cast<size_t>(table.num_layers() * table.num_experts()));
}

LeadingRunner::~LeadingRunner() { watch_loss(nullptr); }

void LeadingRunner::watch_loss(std::function<void()> wake) {
  if (watch_) nodes_->abort_word.unwatch(*std::exchange(watch_, std::nullopt));
  if (wake) watch_ = nodes_->abort_word.watch(std::move(wake));
}

bool LeadingRunner::is_lost() {
  if (!nodes_->abort_word.aborted()) return false;
  constexpr std::chrono::milliseconds kTelling{200};
  world().wait_until_told(kTelling);
  return true;
}

Status LeadingRunner::loss() const {
  const AbortWord::Reason& reason = nodes_->abort_word.reason();
  const std::string who = reason.rank < 0 ? "" : fmt::format("rank {} failed: ", reason.rank);
  return {reason.status.code, fmt::format("{}{} (node 0 was between steps, after step {})", who,
                                          reason.status.message, number_)};
}

Status LeadingRunner::fail(const Status& why) {
  nodes_->abort_word.abort(0, why);
  return why;
}

void LeadingRunner::choose_rows(Node& node, std::span<const ForwardBatch> lanes,
                                std::span<const SampleRow> rows) const {
  node.rows.clear();
  size_t first = 0;
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    const size_t count = lanes[lane].logit_rows.size();
    if (node.lanes.samples[lane] != 0) {
      for (SampleRow row : rows.subspan(first, count)) {
        row.row = std::ssize(node.rows);
        node.rows.push_back(row);
      }
    }
    first += count;
  }
}

template <typename Work>
auto LeadingRunner::or_end(const Work& work) -> decltype(work()) {
  try {
    auto done = work();
    if (!done) return tl::unexpected(fail(done.error()));
    return done;
  } catch (const CommError& failure) {
    return tl::unexpected(failure.status());
  } catch (const std::exception& failure) {
    return tl::unexpected(fail({Code::kInternal, failure.what()}));
  }
}

// Nothing has been sent if this fails.
Result<> LeadingRunner::write(StepPart part, std::span<const SampleRow> rows) {
  const std::span<const ForwardBatch> lanes = part.lanes;
  FATHOM_CHECK(std::ssize(lanes) == placement_.dp, "{} lanes, there are {}", lanes.size(),
               placement_.dp);
  part.id = {world().epoch(), number_ + 1};
  lane_tokens_.clear();
  for (const ForwardBatch& batch : lanes) lane_tokens_.push_back(batch.logit_rows.size());
  tokens_.resize(std::max(tokens_.size(), rows.size()));
  for (Node& node : parts_) {
    choose_rows(node, lanes, rows);
    node.tokens.resize(std::max(node.tokens.size(), node.rows.size()));
    if (&node == &parts_.front()) continue;
    node.message.clear();
    part.has_lane = node.lanes.has;
    part.rows = node.rows;
    write_step(part, node.message);
    const size_t bytes = node.message.bytes().size();
    if (bytes > FramedConnection::kMaxPayload) {
      return error(Code::kResourceExhausted,
                   "a step for another process has {} bytes, at most {}: fewer sequences with "
                   "penalties, or smaller steps, are needed",
                   bytes, FramedConnection::kMaxPayload);
    }
  }
  return {};
}

void LeadingRunner::send() {
  ++number_;
  for (int node = 1; node < world().layout().nnodes(); ++node) {
    world().send(node, parts_[static_cast<size_t>(node)].message.bytes());
  }
}

Result<std::span<const int32_t>> LeadingRunner::draft(std::span<const ForwardBatch> lanes,
                                                      std::span<const SampleRow> rows) {
  return draft_steps_.run(lanes, rows, [&](const auto&... step) { return draft_step(step...); });
}

Result<std::span<const SampledToken>> LeadingRunner::draft_step(
    std::span<const ForwardBatch> lanes, std::span<const std::vector<int32_t>> states,
    std::span<const SampleRow> rows) {
  if (is_lost()) return tl::unexpected(loss());
  StepPart part{.lanes = lanes, .states = states};
  // Experts move before a step of the model, not before one that drafts.
  if (balancer_ != nullptr) part.experts = own_->expert_ranks()->expert_table()->fingerprint();
  FATHOM_RETURN_IF_ERROR(write(part, rows));
  return or_end([&]() -> Result<std::span<const SampledToken>> {
    send();
    FATHOM_TRY(const auto own, own_->draft_step(lanes, states, parts_.front().rows));
    return collect(own, false);
  });
}

Result<> LeadingRunner::begin(std::span<const ForwardBatch> lanes,
                              std::span<const SampleRow> rows) {
  if (is_lost()) return tl::unexpected(loss());
  StepPart part{.lanes = lanes};
  std::vector<ExpertMove> moves;
  if (balancer_ != nullptr) {
    const ExpertTable& table = *balancer_->table();
    if (balancer_->table() != own_->expert_ranks()->expert_table()) {
      moves = moves_between(*own_->expert_ranks()->expert_table(), table);
    }
    part.experts = table.fingerprint();
    part.moves = moves;
  }
  FATHOM_RETURN_IF_ERROR(write(part, rows));
  return or_end([&]() -> Result<> {
    send();
    FATHOM_RETURN_IF_ERROR(move_experts());
    return own_->begin(lanes, parts_.front().rows);
  });
}

// What the step that is being begun says.
Result<> LeadingRunner::move_experts() {
  if (balancer_ == nullptr) return {};
  ExpertRanks& experts = *own_->expert_ranks();
  if (balancer_->table() == experts.expert_table()) return {};
  return experts.place_experts(balancer_->table());
}

Result<std::span<const SampledToken>> LeadingRunner::finish() {
  return or_end([&]() -> Result<std::span<const SampledToken>> {
    FATHOM_TRY(const auto own, own_->finish());
    if (balancer_ != nullptr) balancer_->count(own_->expert_ranks()->expert_counts());
    FATHOM_TRY(const auto tokens, collect(own, balancer_ != nullptr));
    if (balancer_ != nullptr) balancer_->end_step();
    return tokens;
  });
}

Result<std::span<const SampledToken>> LeadingRunner::collect(std::span<const SampledToken> own,
                                                             bool counts) {
  std::copy(own.begin(), own.end(), parts_.front().tokens.begin());
  for (int number = 1; number < world().layout().nnodes(); ++number) {
    Node& node = parts_[static_cast<size_t>(number)];
    if (node.rows.empty() && !counts) continue;
    const auto record = world().receive(number);
    if (!record) {
      return error(Code::kUnavailable, "{} has left", world().layout().describe_node(number));
    }
    FATHOM_RETURN_IF_ERROR(read_result(
        *record, {world().epoch(), number_}, std::span(node.tokens).first(node.rows.size()),
        std::span(expert_counts_).first(counts ? expert_counts_.size() : 0)));
    if (counts) balancer_->count(expert_counts_);
  }
  // From each lane's node, in the order of the lanes.
  std::vector<size_t> taken(parts_.size(), 0);
  size_t total = 0;
  for (size_t lane = 0; lane < lane_tokens_.size(); ++lane) {
    for (size_t node = 0; node < parts_.size(); ++node) {
      if (parts_[node].lanes.samples[lane] == 0) continue;
      for (size_t i = 0; i < lane_tokens_[lane]; ++i) {
        std::swap(tokens_[total++], parts_[node].tokens[taken[node]++]);
      }
    }
  }
  return std::span<const SampledToken>(tokens_).first(total);
}

std::optional<ExpertStats> LeadingRunner::expert_stats() const {
  if (balancer_ == nullptr) return std::nullopt;
  return balancer_->stats();
}

bool LeadingRunner::can_copy_pages(int from_lane, int to_lane) const {
  const WorldLayout& layout = world().layout();
  return own_->can_copy_pages(from_lane, to_lane) &&
         lanes_share_nodes(layout, placement_, from_lane, to_lane);
}

void LeadingRunner::copy_page(int from_lane, int32_t from, int to_lane, int32_t to) {
  WireWriter message;
  write_page_copy({from_lane, from, to_lane, to}, message);
  for (size_t node = 0; node < parts_.size(); ++node) {
    if (parts_[node].lanes.has[static_cast<size_t>(from_lane)] == 0) continue;
    if (node == 0) {
      own_->copy_page(from_lane, from, to_lane, to);
      continue;
    }
    try {
      world().send(static_cast<int>(node), message.bytes());
    } catch (const CommError&) {  // the next step finds the world ended
    }
  }
}

}  // namespace fathom
