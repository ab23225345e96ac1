#include "model/rank_team.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "comm/spin.h"
#include "model/layer_options.h"
#include "placement/split.h"

namespace fathom {
namespace {

// --quantization fp8 makes scales for blocks of 128 columns: W_o is cut between blocks only.
Result<> check_quantized_heads(const ModelConfig& config, const RankTeamOptions& options) {
  if (!options.load.quantize_fp8 || options.placement.tp == 1) return {};
  if (config.v_dim % kColumnBlock == 0) return {};
  return invalid(
      "tp is {} and weights are quantized to FP8 while they are loaded: v_head_dim is {}, must be "
      "a multiple of {}",
      options.placement.tp, config.v_dim, kColumnBlock);
}

// The ends of a group of options.world_ranks, one for each of these ranks in this process.
std::vector<std::unique_ptr<Group>> make_ends(World* world, AbortWord& abort_word,
                                              const GroupOptions& options) {
  if (world != nullptr) return world->make_groups(options);
  return make_local_groups(static_cast<int>(options.world_ranks.size()), abort_word, options);
}

// The groups of all lanes, one end for each rank of this process.
std::vector<std::unique_ptr<Group>> make_lanes(const Placement& placement, World* world,
                                               AbortWord& abort_word, const GroupOptions& options) {
  std::vector<std::unique_ptr<Group>> ends;
  for (int lane = 0; lane < placement.dp; ++lane) {
    GroupOptions own = options;
    if (placement.dp > 1) own.name = fmt::format("{} {}", options.name, lane);
    own.world_ranks.clear();
    for (int rank = 0; rank < placement.tp; ++rank) {
      own.world_ranks.push_back(placement.rank_of(lane, rank));
    }
    for (auto& end : make_ends(world, abort_word, own)) ends.push_back(std::move(end));
  }
  return ends;
}

constexpr uint64_t kStop = std::numeric_limits<uint64_t>::max();

// What the team's ranks in this process hold.
std::vector<ModelSpec> specs_of(const ModelConfig& config, const RankTeamOptions& options) {
  int first = 0, size = options.placement.world();
  if (options.world != nullptr) {
    const WorldLayout& layout = options.world->layout();
    FATHOM_CHECK(layout.size() == size, "{} ranks in a world of {}", size, layout.size());
    first = layout.first_rank(layout.node_rank);
    size = layout.ranks_of_node[static_cast<size_t>(layout.node_rank)];
  }
  std::vector<ModelSpec> specs;
  specs.reserve(static_cast<size_t>(size));
  for (int rank = first; rank < first + size; ++rank) {
    specs.push_back(
        make_spec(config, options.placement, rank, options.expert_table, options.mtp_layers));
  }
  return specs;
}

}  // namespace

Result<std::unique_ptr<RankTeam>> RankTeam::load(const Checkpoint& checkpoint,
                                                 const RankTeamOptions& options) {
  FATHOM_TRY(auto teams, load_several(checkpoint, {&options, 1}));
  return std::move(teams.front());
}

Result<std::vector<std::unique_ptr<RankTeam>>> RankTeam::load_several(
    const Checkpoint& checkpoint, std::span<const RankTeamOptions> options) {
  std::vector<ModelSpec> specs;
  std::vector<size_t> ends;  // of the teams' ranks
  for (const RankTeamOptions& one : options) {
    FATHOM_RETURN_IF_ERROR(check_quantized_heads(checkpoint.config(), one));
    for (ModelSpec& spec : specs_of(checkpoint.config(), one)) specs.push_back(std::move(spec));
    ends.push_back(specs.size());
  }
  const RankTeamOptions& first = options.front();
  FATHOM_TRY(std::vector<ModelWeights> weights,
             load_weights(checkpoint, specs, first.model.compute, first.load));
  std::vector<std::unique_ptr<RankTeam>> teams;
  size_t begin = 0;
  for (size_t i = 0; i < options.size(); begin = ends[i++]) {
    const size_t count = ends[i] - begin;
    FATHOM_TRY(teams.emplace_back(),
               create(checkpoint, options[i], std::span(specs).subspan(begin, count),
                      std::span(weights).subspan(begin, count)));
  }
  return teams;
}

// `specs` and `weights`: of the team's ranks in this process.
Result<std::unique_ptr<RankTeam>> RankTeam::create(const Checkpoint& checkpoint,
                                                   const RankTeamOptions& options,
                                                   std::span<const ModelSpec> specs,
                                                   std::span<ModelWeights> weights) {
  const ModelConfig& config = checkpoint.config();
  const Placement& placement = options.placement;
  World* const world = options.world;
  std::unique_ptr<RankTeam> team(new RankTeam);
  if (world != nullptr) {
    team->abort_word_ = &world->abort_word();
    team->first_rank_ = world->layout().first_rank(world->layout().node_rank);
  }
  const int size = static_cast<int>(specs.size());
  const int cores = usable_cores();
  const int threads = std::max(options.num_threads > 0 ? options.num_threads : cores, size);
  team->placement_ = placement;
  team->spins_ = threads <= cores;

  std::vector<std::unique_ptr<Group>> lane_ends(static_cast<size_t>(size));
  if (placement.tp > 1) {
    lane_ends = make_lanes(placement, world, *team->abort_word_, options.group);
  }
  std::vector<std::unique_ptr<Group>> world_ends(static_cast<size_t>(size));
  if (placement.exchanges_tokens()) {
    team->expert_table_ = options.expert_table;
    GroupOptions all = options.group;
    all.name = "world";
    all.world_ranks.resize(static_cast<size_t>(placement.world()));
    std::iota(all.world_ranks.begin(), all.world_ranks.end(), 0);
    world_ends = make_ends(world, *team->abort_word_, all);
    if (size < placement.world()) {
      team->expert_source_ = {checkpoint, options.model.compute, options.load};
      team->expert_source_->load.show_progress = false;
    }
  }
  for (int i = 0; i < size; ++i) {
    Rank& rank = team->ranks_.emplace_back(threads / size + (i < threads % size));
    const auto at = static_cast<size_t>(i);
    rank.lane_number = placement.lane_of(team->first_rank_ + i);
    rank.tp_rank = placement.tp_rank_of(team->first_rank_ + i);
    rank.lane = std::move(lane_ends[at]);
    rank.world = std::move(world_ends[at]);
    FATHOM_TRY(rank.model,
               DeepSeekModel::create(specs[at], std::move(weights[at]), options.model, rank.stream,
                                     {.lane = rank.lane.get(), .world = rank.world.get()}));
    const int64_t layers = DeepSeekModel::cache_layers(config, options.mtp_layers);
    FATHOM_TRY(rank.cache,
               LatentCache::allocate(
                   latent_layout(config, options.cache_format), layers, options.num_pages,
                   DeepSeekModel::state_bytes(config, options.model.compute, options.mtp_layers),
                   index_key_layout(config, options.cache_format),
                   layers_with_index_keys(config, layers)));
  }
  for (size_t i = 1; i < team->ranks_.size(); ++i) {
    team->ranks_[i].thread = std::thread([team = team.get(), i] { team->serve(i); });
  }
  return team;
}

RankTeam::~RankTeam() {
  step_.store(kStop);
  step_.notify_all();
  for (Rank& rank : ranks_) {
    if (rank.thread.joinable()) rank.thread.join();
  }
}

Result<> RankTeam::forward(std::span<const ForwardBatch> lanes, TensorView logits,
                           std::span<int32_t> tokens) {
  return do_work({lanes, logits, tokens});
}

Result<> RankTeam::draft(std::span<const ForwardBatch> lanes,
                         std::span<const std::vector<int32_t>> states, TensorView logits,
                         std::span<int32_t> tokens) {
  FATHOM_CHECK(states.size() == lanes.size(), "{} lanes, states of {}", lanes.size(),
               states.size());
  return do_work({lanes, logits, tokens, states});
}

Result<> RankTeam::do_work(const Work& work) {
  work_ = work;
  if (placement_.world() == 1) {
    compute(ranks_.front());
    return {};
  }
  if (!has_failed()) {
    running_.store(size() - 1);
    step_.fetch_add(1);
    step_.notify_all();
    run(0);
    wait_for_ranks();
  }
  if (!has_failed()) return {};
  return tl::unexpected<Status>(failure());
}

Result<> RankTeam::place_experts(std::shared_ptr<const ExpertTable> table) {
  FATHOM_CHECK(expert_table_ != nullptr && table->num_ranks() == expert_table_->num_ranks() &&
                   table->num_layers() == expert_table_->num_layers() &&
                   table->num_experts() == expert_table_->num_experts(),
               "a table of {} layers, {} experts and {} ranks", table->num_layers(),
               table->num_experts(), table->num_ranks());
  std::vector<ModelSpec> specs;
  specs.reserve(ranks_.size());
  for (int rank = 0; rank < size(); ++rank) {
    specs.push_back(make_spec(config(), placement_, first_rank_ + rank, table));
  }
  // All slots are filled before the first rank gives up its own.
  std::vector<DeepSeekModel::ExpertSlots> slots(ranks_.size());
  for (int64_t layer = 0; layer < table->num_layers(); ++layer) {
    if (table->lists_of(layer) == expert_table_->lists_of(layer)) continue;
    FATHOM_TRY(LayerSlots of_layer, slots_of_layer(*table, specs, layer));
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      slots[rank].emplace(layer, std::move(of_layer[rank]));
    }
  }
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank].model->place_experts(table, std::move(slots[rank]));
  }
  expert_table_ = std::move(table);
  return {};
}

// `specs`: of the ranks here, by `table`.
Result<RankTeam::LayerSlots> RankTeam::slots_of_layer(const ExpertTable& table,
                                                      std::span<const ModelSpec> specs,
                                                      int64_t moe_layer) const {
  LayerSlots slots(ranks_.size());
  std::vector<MlpSpec> missing;
  std::vector<MlpWeights*> places;  // of the missing ones
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const auto experts = table.experts_of(moe_layer, first_rank_ + static_cast<int>(rank));
    slots[rank].resize(experts.size());
    for (size_t slot = 0; slot < experts.size(); ++slot) {
      const auto copies = expert_table_->copies_of(moe_layer, experts[slot]);
      const auto held = std::find_if(copies.begin(), copies.end(),
                                     [&](const ExpertCopy& copy) { return has_rank(copy.rank); });
      if (held == copies.end()) {
        missing.push_back(specs[rank].expert(moe_layer, slot));
        places.push_back(&slots[rank][slot]);
        continue;
      }
      const DeepSeekModel& model = *ranks_[static_cast<size_t>(held->rank - first_rank_)].model;
      const MlpWeights& weights = model.expert_slots(moe_layer)[static_cast<size_t>(held->slot)];
      slots[rank][slot] = {weights.gate_up.share(), weights.down.share()};
    }
  }
  if (missing.empty()) return slots;
  FATHOM_CHECK(expert_source_.has_value(), "{} experts are on no rank", missing.size());
  FATHOM_TRY(std::vector<MlpWeights> read,
             load_mlps(expert_source_->checkpoint, missing, expert_source_->compute,
                       expert_source_->load));
  for (size_t i = 0; i < read.size(); ++i) *places[i] = std::move(read[i]);
  return slots;
}

// What a rank throws ends the others too.
void RankTeam::run(size_t index) {
  run_rank(*abort_word_, first_rank_ + static_cast<int>(index), [&] {
    try {
      compute(ranks_[index]);
    } catch (const CommError& failure) {
      note_failure(failure.status());
      throw;
    }
  });
}

// The text of a rank that waited names the failed rank and the collective.
void RankTeam::note_failure(const Status& why) {
  const std::lock_guard lock(failure_mutex_);
  if (!failure_) failure_ = why;
}

Status RankTeam::failure() {
  const std::lock_guard lock(failure_mutex_);
  if (failure_) return *failure_;
  const AbortWord::Reason& reason = abort_word_->reason();
  if (reason.rank < 0) return reason.status;
  return {reason.status.code,
          fmt::format("rank {} failed: {}", reason.rank, reason.status.message)};
}

void RankTeam::compute(Rank& rank) {
  const auto lane = static_cast<size_t>(rank.lane_number);
  const ForwardBatch& batch = work_.lanes[lane];
  TensorView logits;
  std::span<int32_t> tokens;
  if (rank.tp_rank == 0) {
    int64_t first = 0;
    for (size_t l = 0; l < lane; ++l) {
      if (has_rank(placement_.rank_of(static_cast<int>(l), 0))) {
        first += std::ssize(work_.lanes[l].logit_rows);
      }
    }
    logits = work_.logits.rows(first, std::ssize(batch.logit_rows));
    if (placement_.tp > 1 && !batch.largest_only.empty()) {
      tokens = work_.tokens.subspan(static_cast<size_t>(first), batch.logit_rows.size());
    }
  }
  if (work_.states.empty()) {
    rank.model->forward(batch, rank.cache, logits, tokens);
  } else {
    rank.model->draft(batch, work_.states[lane], rank.cache, logits, tokens);
  }
}

void RankTeam::serve(size_t index) {
  for (uint64_t seen = 0; (seen = wait_for_work(seen)) != kStop;) {
    run(index);
    if (running_.fetch_sub(1) == 1) running_.notify_one();
  }
}

// The ranks of a lane end together; other lanes may take longer.
void RankTeam::wait_for_ranks() const {
  if (spins_) spin_while(kRankSpin, [&] { return running_.load(std::memory_order_acquire) > 0; });
  for (int left = running_.load(); left > 0; left = running_.load()) running_.wait(left);
}

uint64_t RankTeam::wait_for_work(uint64_t seen) const {
  if (spins_) spin_while(kRankSpin, [&] { return step_.load(std::memory_order_acquire) == seen; });
  step_.wait(seen);
  return step_.load();
}

}  // namespace fathom
