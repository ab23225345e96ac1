#include "cli/rank_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "base/math.h"
#include "checkpoint/tensor_names.h"
#include "model/expert_exchange.h"
#include "model/model_spec.h"
#include "model/workspace.h"

namespace fathom {
namespace {

// Bytes of each rank's workspaces. Allocating them here takes no memory, because their pages are
// never touched.
Result<std::vector<int64_t>> working_space_bytes(const ModelConfig& config,
                                                 const ModelRunnerOptions& options,
                                                 int num_threads) {
  std::vector<int64_t> of_ranks;
  const auto [first, count] = ranks_here(options);
  for (int rank = first; rank < first + count; ++rank) {
    const ModelSpec spec = make_spec(config, options.placement, rank, options.expert_table,
                                     num_drafting_layers(config, options.max_drafts));
    FATHOM_TRY(
        const Workspace workspace,
        Workspace::allocate(spec, options.compute, options.max_batched_tokens, options.attention,
                            static_cast<int>(ceil_div(num_threads, count))));
    of_ranks.push_back(workspace.bytes());
    if (options.placement.exchanges_tokens()) {
      of_ranks.back() += ExpertExchange::planned_bytes(config, options.placement, options.compute,
                                                       options.max_batched_tokens);
    }
  }
  return of_ranks;
}

// As stored: of the MTP layers that are loaded, without copies of the main model's tensors.
int64_t mtp_layers_bytes(const Checkpoint& checkpoint, int64_t layers) {
  int64_t bytes = 0;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string prefix =
        fmt::format("{}{}.", tensor_names::kLayers, checkpoint.config().num_layers + layer);
    for (const auto& [name, entry] : checkpoint.tensors()) {
      if (name.starts_with(prefix) && !name.ends_with(tensor_names::kMtpEmbedding) &&
          !name.ends_with(tensor_names::kMtpHead)) {
        bytes += entry.bytes;
      }
    }
  }
  return bytes;
}

// Bytes of the head's copy that MTP layers draft with (ModelWeights::draft_head); 0 if there is
// none.
int64_t draft_head_bytes(const Checkpoint& checkpoint, const ModelRunnerOptions& options) {
  const ModelConfig& config = checkpoint.config();
  const int64_t layers = num_drafting_layers(config, options.max_drafts);
  if (layers == 0 || options.compute != DType::kBF16) return 0;
  if (config.hidden > DraftHead::kMostCols) return 0;
  const ModelSpec spec = make_spec(config, options.placement, 0, options.expert_table, layers);
  const auto head = checkpoint.tensors().find(spec.head.name);
  if (head == checkpoint.tensors().end() || size_of(head->second.dtype) < 2) return 0;
  return DraftHead::bytes_of(config.vocab_size, config.hidden);
}

// How many of all layers' routed experts these ranks hold; the ranks of a process share an expert's
// weights.
double expert_share(const ModelConfig& config, const ModelRunnerOptions& options, int first,
                    int count) {
  int64_t held = 0;
  for (int64_t layer = 0; layer < options.expert_table->num_layers(); ++layer) {
    std::set<int32_t> experts;
    for (int rank = first; rank < first + count; ++rank) {
      const auto of_rank = options.expert_table->experts_of(layer, rank);
      experts.insert(of_rank.begin(), of_rank.end());
    }
    held += std::ssize(experts);
  }
  return static_cast<double>(held) /
         static_cast<double>(config.num_experts * options.expert_table->num_layers());
}

// The weights that are loaded into this process, and those of its largest rank.
std::vector<MemoryLine> weights_here(const Checkpoint& checkpoint,
                                     const ModelRunnerOptions& options, int64_t* of_rank) {
  const Inventory inventory = take_loaded_inventory(checkpoint, options.load);
  // Ranks of different lanes share what is cut over a lane.
  const int tp = options.placement.tp;
  const auto [first, count] = ranks_here(options);
  int64_t cut = 0, experts_of_rank = 0;
  for (const MemoryLine& group : weight_lines(inventory, false)) cut += group.bytes;
  cut += mtp_layers_bytes(checkpoint, num_drafting_layers(checkpoint.config(), options.max_drafts));
  cut += draft_head_bytes(checkpoint, options);
  std::vector<MemoryLine> lines;
  if (options.expert_table != nullptr) {
    const ModelConfig& config = checkpoint.config();
    const int64_t experts = inventory.of(WeightGroup::kExperts).bytes;
    cut -= experts;
    const auto bytes_of = [&](int first_rank, int ranks) {
      const double share = expert_share(config, options, first_rank, ranks);
      return static_cast<int64_t>(static_cast<double>(experts) * share);
    };
    lines.push_back({"routed experts", bytes_of(first, count)});
    for (int rank = first; rank < first + count; ++rank) {
      experts_of_rank = std::max(experts_of_rank, bytes_of(rank, 1));
    }
    // A layer's new experts are read before its old ones go.
    if (options.balancer.rebalances && count < options.placement.world()) {
      lines.push_back(
          {"experts that move", ceil_div(lines.back().bytes, num_moe_layers(config, false))});
    }
  }
  lines.insert(lines.begin(), {"weights", ceil_div(cut * std::min(tp, count), tp)});
  *of_rank = ceil_div(cut, tp) + experts_of_rank;
  return lines;
}

}  // namespace

std::pair<int, int> ranks_here(const ModelRunnerOptions& options) {
  if (options.world == nullptr) return {0, options.placement.world()};
  const WorldLayout& layout = options.world->layout();
  return {layout.first_rank(layout.node_rank),
          layout.ranks_of_node[static_cast<size_t>(layout.node_rank)]};
}

Result<MemoryRequest> rank_memory(const Checkpoint& checkpoint, const AvailableMemory& available,
                                  int num_threads, const ModelRunnerOptions& options) {
  MemoryRequest request;
  request.budget = available.bytes;
  if (options.world != nullptr) {
    const WorldLayout& layout = options.world->layout();
    request.budget = request.budget / layout.ranks_on_machine() * ranks_here(options).second;
  }
  request.rank.ranks = ranks_here(options).second;
  request.fixed = weights_here(checkpoint, options, &request.rank.weights);
  FATHOM_TRY(const auto working, working_space_bytes(checkpoint.config(), options, num_threads));
  request.rank.working_space = *std::max_element(working.begin(), working.end());
  request.fixed.push_back(
      {"working space", std::accumulate(working.begin(), working.end(), int64_t{0})});
  return request;
}

}  // namespace fathom
