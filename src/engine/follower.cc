#include "engine/follower.h"

#include <utility>
#include <vector>

#include "engine/step_check.h"

namespace fathom {
namespace {

class Follower {
 public:
  Follower(World& world, Runner& own, const Placement& placement, int64_t max_rows)
      : world_(world),
        own_(own),
        lanes_(lanes_of_node(world.layout(), world.layout().node_rank, placement)),
        bounds_{.vocab_size = own.vocab_size(),
                .max_model_len = own.max_model_len(),
                .num_pages = own.num_pages(),
                .max_rows = max_rows,
                .max_drafts = own.max_drafts()},
        step_(placement.dp),
        draft_rows_(static_cast<size_t>(placement.dp)) {}

  Result<> run() {
    while (const auto message = world_.receive(0)) {
      WireReader reader(*message);
      const auto kind = static_cast<StepMessage>(reader.u32());
      switch (kind) {
        case StepMessage::kStep:
        case StepMessage::kDraft:
          FATHOM_RETURN_IF_ERROR(run_step(kind, reader));
          break;
        case StepMessage::kCopyPage:
          FATHOM_RETURN_IF_ERROR(copy_page(reader));
          break;
        default:
          return invalid("node 0 sent a message of {} bytes that is none of this version",
                         message->size());
      }
    }
    return {};
  }

 private:
  Result<> check() {
    ++number_;
    if (step_.id() != StepId{world_.epoch(), number_}) {
      return invalid("step {} of epoch {:x} came, awaited is step {} of {:x}", step_.id().number,
                     step_.id().epoch, number_, world_.epoch());
    }
    int64_t num_logits = 0;
    for (size_t lane = 0; lane < lanes_.size(); ++lane) {
      const ForwardBatch& batch = step_.lanes()[lane];
      FATHOM_RETURN_IF_ERROR(check_lane(batch, lane));
      if (lanes_.samples[lane] != 0) num_logits += std::ssize(batch.logit_rows);
    }
    return check_rows(step_.rows(), num_logits, bounds_);
  }

  Result<> check_lane(const ForwardBatch& batch, size_t lane) {
    const auto number = static_cast<int>(lane);
    if (step_.states().empty()) {
      draft_rows_[lane] = 0;
      return check_batch(batch, number, bounds_);
    }
    const int64_t before = std::exchange(draft_rows_[lane], std::ssize(batch.logit_rows));
    return check_draft_batch(batch, step_.states()[lane], before, number, bounds_);
  }

  // Experts are where the step says.
  Result<> place_experts() {
    ExpertRanks* const experts = own_.expert_ranks();
    if (experts != nullptr && !step_.moves().empty()) {
      FATHOM_TRY(ExpertTable table, apply_moves(*experts->expert_table(), step_.moves()));
      FATHOM_RETURN_IF_ERROR(
          experts->place_experts(std::make_shared<const ExpertTable>(std::move(table))));
    }
    const uint64_t own = experts == nullptr ? 0 : experts->expert_table()->fingerprint();
    if (own == step_.experts()) return {};
    return invalid("the experts of step {} are placed by table {:016x} here, by {:016x} on node 0",
                   number_, own, step_.experts());
  }

  Result<> run_step(StepMessage kind, WireReader& reader) {
    FATHOM_RETURN_IF_ERROR(step_.read(kind, reader));
    FATHOM_RETURN_IF_ERROR(check());
    FATHOM_RETURN_IF_ERROR(place_experts());
    if (kind == StepMessage::kDraft) {
      FATHOM_TRY(const auto drafts, own_.draft_step(step_.lanes(), step_.states(), step_.rows()));
      return reply(drafts, {});
    }
    FATHOM_RETURN_IF_ERROR(own_.begin(step_.lanes(), step_.rows()));
    FATHOM_TRY(const auto tokens, own_.finish());
    ExpertRanks* const experts = own_.expert_ranks();
    return reply(tokens,
                 experts == nullptr ? std::span<const int32_t>() : experts->expert_counts());
  }

  // Node 0 awaits nothing of a node that has nothing to say.
  Result<> reply(std::span<const SampledToken> tokens, std::span<const int32_t> expert_counts) {
    if (tokens.empty() && expert_counts.empty()) return {};
    reply_.clear();
    write_result(step_.id(), tokens, expert_counts, reply_);
    world_.send(0, reply_.bytes());
    return {};
  }

  Result<> copy_page(WireReader& reader) {
    FATHOM_TRY(const PageCopy copy, read_page_copy(reader));
    const auto in = [](int64_t value, int64_t end) { return value >= 0 && value < end; };
    const auto num_lanes = static_cast<int64_t>(lanes_.size());
    if (!in(copy.from_lane, num_lanes) || !in(copy.to_lane, num_lanes) ||
        !in(copy.from_page, bounds_.num_pages) || !in(copy.to_page, bounds_.num_pages) ||
        !own_.can_copy_pages(copy.from_lane, copy.to_lane)) {
      return invalid("page {} of lane {} cannot be copied to page {} of lane {}", copy.from_page,
                     copy.from_lane, copy.to_page, copy.to_lane);
    }
    own_.copy_page(copy.from_lane, copy.from_page, copy.to_lane, copy.to_page);
    return {};
  }

  World& world_;
  Runner& own_;
  const NodeLanes lanes_;
  const StepBounds bounds_;
  ReceivedStep step_;
  std::vector<int64_t> draft_rows_;  // [lanes]: logit rows of the last message, if that drafted
  WireWriter reply_;
  uint64_t number_ = 0;  // of the last step, those of drafts too
};

}  // namespace

Result<> follow_steps(NodeWorld& nodes, Runner& own, const Placement& placement, int64_t max_rows) {
  const WorldLayout& layout = nodes.world->layout();
  Result<> done;
  try {
    done = Follower(*nodes.world, own, placement, max_rows).run();
  } catch (const CommError& failure) {
    return tl::unexpected(failure.status());
  } catch (const std::exception& failure) {
    done = error(Code::kInternal, "{}", failure.what());
  }
  // The first of the node's ranks stands for it.
  if (!done) nodes.abort_word.abort(layout.first_rank(layout.node_rank), done.error());
  return done;
}

}  // namespace fathom
