// The runner of node 0 of several: sends each step to all nodes, runs its own ranks, and collects
// the tokens that other nodes sample. The same for each step that drafts, since all ranks of a lane
// need the drafts that one of them has sampled. Where tokens go to ranks of experts, it counts the
// experts' loads on all nodes and says where experts are: they move before a step, a layer at a
// time.
//
// Whatever goes wrong after a step has been sent ends the world: the nodes would no longer agree on
// what has been computed. Then the runner is lost, and the engine dead.
//
// One step is in flight. Engine thread only.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/world.h"
#include "engine/draft_steps.h"
#include "engine/lane_nodes.h"
#include "engine/runner.h"
#include "engine/step_wire.h"

namespace fathom {

// A process's membership of a world. Ends after all that meets through it.
struct NodeWorld {
  AbortWord abort_word;
  std::unique_ptr<World> world;
};

class LeadingRunner : public Runner {
 public:
  // `own` runs this process's ranks. It is given the batches of all lanes, leaves out those that it
  // has no ranks of, and samples the rows of lanes whose first rank it has; it may be given a step
  // without rows. The world's size is placement.world(). `balancer`: whether experts move, and
  // when.
  LeadingRunner(std::unique_ptr<NodeWorld> nodes, std::unique_ptr<Runner> own,
                const Placement& placement, const ExpertBalancerOptions& balancer = {});
  ~LeadingRunner() override;

  int64_t vocab_size() const override { return own_->vocab_size(); }
  int64_t max_model_len() const override { return own_->max_model_len(); }
  int64_t num_pages() const override { return own_->num_pages(); }
  int num_lanes() const override { return placement_.dp; }
  int64_t keys_worth_a_row() const override { return own_->keys_worth_a_row(); }
  bool answers_equal_prompts() const override { return own_->answers_equal_prompts(); }
  int64_t max_drafts() const override { return own_->max_drafts(); }

  Result<std::span<const int32_t>> draft(std::span<const ForwardBatch> lanes,
                                         std::span<const SampleRow> rows) override;
  Result<std::span<const SampledToken>> draft_step(std::span<const ForwardBatch> lanes,
                                                   std::span<const std::vector<int32_t>> states,
                                                   std::span<const SampleRow> rows) override;
  Result<> begin(std::span<const ForwardBatch> lanes, std::span<const SampleRow> rows) override;
  Result<std::span<const SampledToken>> finish() override;
  // A dead engine ends its process: the other nodes know why when this is true.
  bool is_lost() override;
  Status loss() const override;
  void watch_loss(std::function<void()> wake) override;

  bool can_copy_pages(int from_lane, int to_lane) const override;
  void copy_page(int from_lane, int32_t from, int to_lane, int32_t to) override;
  std::optional<ExpertStats> expert_stats() const override;
  const Stream* host_stream() const override { return own_->host_stream(); }

 private:
  struct Node {
    NodeLanes lanes;
    WireWriter message;
    std::vector<SampleRow> rows;       // of the lanes that it samples
    std::vector<SampledToken> tokens;  // [rows]; never shrinks, to keep its vectors' memory
  };
  World& world() const { return *nodes_->world; }
  // Writes each node's message; `part` is the same for all of them but for its rows.
  Result<> write(StepPart part, std::span<const SampleRow> rows);
  void send();
  Result<> move_experts();
  // The tokens of the step in flight; `own` are those that this process sampled. `counts`: whether
  // nodes report the loads of their experts.
  Result<std::span<const SampledToken>> collect(std::span<const SampledToken> own, bool counts);
  // Runs `work`; an error or an exception of it ends the world.
  template <typename Work>
  auto or_end(const Work& work) -> decltype(work());
  // The sample rows of the lanes that node `node` samples, with their indices among these.
  void choose_rows(Node& node, std::span<const ForwardBatch> lanes,
                   std::span<const SampleRow> rows) const;
  // Ends the world. Returns the first reason why it ended.
  Status fail(const Status& why);

  const std::unique_ptr<NodeWorld> nodes_;  // ends after own_
  const std::unique_ptr<Runner> own_;
  const Placement placement_;
  DraftSteps draft_steps_;
  std::vector<Node> parts_;          // [nodes]; the first is this process
  std::vector<size_t> lane_tokens_;  // [lanes]: logit rows of the step in flight
  std::vector<SampledToken> tokens_;
  // Null where tokens are not exchanged. Its table is ahead of the ranks' until the next step.
  std::unique_ptr<ExpertBalancer> balancer_;
  std::vector<int32_t> expert_counts_;  // [layers * experts], a node's
  uint64_t number_ = 0;                 // of the last step, those of drafts too
  std::optional<int> watch_;
};

}  // namespace fathom
