#include "cli/node_engine.h"

#include <csignal>
#include <map>
#include <string>

#include "base/log.h"
#include "base/version.h"
#include "checkpoint/fingerprint.h"
#include "cli/command_line.h"
#include "cli/stop_signals.h"
#include "comm/rendezvous.h"
#include "comm/wire.h"
#include "device/cpu/isa.h"
#include "engine/follower.h"
#include "engine/model_runner.h"

namespace fathom {
namespace {

// What node 0 decides for all: sizes that depend on the command and on its memory.
struct Setup {
  int64_t cache_tokens = 0;  // of a lane
  int64_t max_batched_tokens = 0;
  int64_t max_model_len = 0;  // 0: the model's
};

void write_setup(const Setup& setup, WireWriter& writer) {
  writer.i64(setup.cache_tokens);
  writer.i64(setup.max_batched_tokens);
  writer.i64(setup.max_model_len);
}

Result<Setup> read_setup(std::span<const std::byte> record) {
  WireReader reader(record);
  Setup setup;
  setup.cache_tokens = reader.i64();
  setup.max_batched_tokens = reader.i64();
  setup.max_model_len = reader.i64();
  if (!reader.ended() || setup.cache_tokens < 1 || setup.max_batched_tokens < 1 ||
      setup.max_model_len < 0) {
    return invalid("node 0 sent sizes that are none");
  }
  return setup;
}

// What must be equal on all nodes. Names are flags where there is one.
Result<std::map<std::string, std::string>> facts_of(const LoadedEngine& loaded,
                                                    const ModelFlags& flags) {
  FATHOM_TRY(std::string model, fingerprint(loaded.checkpoint));
  const Placement placement = flags.placement();
  std::map<std::string, std::string> facts = {
      {"version", program_version()},
      {"model files", std::move(model)},
      {"--tp", std::to_string(placement.tp)},
      {"--dp", std::to_string(placement.dp)},
      {"--dtype", loaded.compute == DType::kF32 ? "float32" : "bfloat16"},
      {"--kv-cache-dtype", std::string(name_of(loaded.cache_format))},
      {"--quantization", flags.quantization == "none" ? "auto" : flags.quantization},
      {"--attention", flags.attention},
      {"--load-format", flags.load_format},
      {"--mtp", std::to_string(loaded.max_drafts)},
      // Other instructions add in another order.
      {"FATHOM_CPU_ISA", std::string(name_of(cpu_isa()))},
  };
  facts["--enable-eplb"] = flags.eplb ? "on" : "off";  // the memory plan counts on it
  facts["--enable-expert-parallel"] = placement.exchanges_tokens() ? "on" : "off";
  if (placement.exchanges_tokens()) {
    FATHOM_TRY(const auto table, expert_table_of(loaded.checkpoint.config(), flags));
    // Named after all flags, on which it depends: the first difference is told.
    facts["--num-redundant-experts"] = std::to_string(placement.redundant_experts);
    facts["table of experts"] = fmt::format("{:016x}", table->fingerprint());
  }
  if (const auto& indexer = loaded.checkpoint.config().indexer) {
    facts["--dsa-dense-threshold"] = std::to_string(loaded.dense_keys.value_or(indexer->topk));
  }
  if (flags.is_dummy()) facts["--seed"] = std::to_string(loaded.load.dummy_seed);
  return facts;
}

// Calls body(). An error that it returns or throws ends the world for all nodes, in the name of
// this node's first rank.
template <typename T>
Result<T> end_world_on_error(NodeWorld& nodes, const std::function<Result<T>()>& body) {
  const WorldLayout& layout = nodes.world->layout();
  Result<T> result = error(Code::kInternal, "not run");
  try {
    result = body();
  } catch (const CommError& failure) {
    return tl::unexpected<Status>(failure.status());
  } catch (const std::exception& failure) {
    result = error(Code::kInternal, "{}", failure.what());
  }
  if (!result) nodes.abort_word.abort(layout.first_rank(layout.node_rank), result.error());
  return result;
}

Result<std::vector<std::byte>> receive_from(World& world, int node) {
  auto message = world.receive(node);
  if (message) return std::move(*message);
  return error(Code::kUnavailable, "{} has left", world.layout().describe_node(node));
}

// Loads what node 0 says and runs its steps. The exit status.
Result<int> follow(const ModelFlags& flags, const NodePlace& place) {
  std::signal(SIGPIPE, SIG_IGN);
  StopSignals signals;
  EngineNeeds needs;
  needs.needs_tokenizer = false;
  FATHOM_TRY(LoadedEngine loaded, open_model(flags, needs));
  FATHOM_TRY(const auto nodes, join_nodes(place, loaded, flags));
  World& world = *nodes->world;
  ModelFlags own = flags;
  const auto load = [&]() -> Result<std::unique_ptr<ModelRunner>> {
    FATHOM_TRY(const auto record, receive_from(world, 0));
    FATHOM_TRY(const Setup setup, read_setup(record));
    own.max_total_tokens = setup.cache_tokens;
    own.max_batched_tokens = setup.max_batched_tokens;
    own.max_model_len = setup.max_model_len;
    own.quiet = true;
    loaded.load.show_progress = false;  // node 0 shows it
    FATHOM_TRY(const ModelRunnerOptions options, plan_ranks(loaded, own, needs, &world));
    FATHOM_TRY(auto runner, ModelRunner::create(loaded.checkpoint, options));
    // Node 0 may serve from here on: a signal must no longer end this node at once.
    signals.may_wait();
    world.send(0, {});
    return runner;
  };
  FATHOM_TRY(const auto runner, end_world_on_error<std::unique_ptr<ModelRunner>>(*nodes, load));
  log_info("{} is ready and computes what node 0 sends",
           world.layout().describe_node(place.node_rank));
  const auto done = follow_steps(*nodes, *runner, flags.placement(), *own.max_batched_tokens);
  if (done) {
    log_info("node 0 has ended");
    return 0;
  }
  return report_failure(done.error().message, kExitDead);
}

}  // namespace

Result<int> lead_or_follow(const ModelFlags& flags, const std::function<Result<int>()>& lead) {
  FATHOM_TRY(const NodePlace place, node_place(flags.nodes));
  if (!place.is_one_of_several()) return lead();
  Result<int> status = place.follows() ? follow(flags, place) : lead();
  // Another node has failed, or has not come.
  if (!status && status.error().code == Code::kUnavailable) {
    return report_failure(status.error().message, kExitDead);
  }
  return status;
}

Result<std::unique_ptr<NodeWorld>> join_nodes(const NodePlace& place, const LoadedEngine& loaded,
                                              const ModelFlags& flags) {
  FATHOM_TRY(const std::vector<int> ranks, ranks_of_nodes(place, flags.placement().world()));
  const WorldLayout layout{place.node_rank, ranks};
  JoinOptions options;
  options.nnodes = place.nnodes;
  options.node_rank = place.node_rank;
  options.address = place.address;
  options.num_ranks = ranks[static_cast<size_t>(place.node_rank)];
  options.machine = loaded.available.pool;
  options.limit = place.join_limit;
  FATHOM_TRY(options.facts, facts_of(loaded, flags));
  log_info("{} of {} {} {}", layout.describe_node(place.node_rank), place.nnodes,
           place.follows() ? "joins node 0 at" : "leads; the others join it at", place.address);
  auto nodes = std::make_unique<NodeWorld>();
  FATHOM_TRY(nodes->world, join(options, nodes->abort_word));
  return nodes;
}

Result<std::unique_ptr<Runner>> load_nodes(std::unique_ptr<NodeWorld> nodes, LoadedEngine& loaded,
                                           const ModelFlags& flags, const EngineNeeds& needs) {
  World& world = *nodes->world;
  const int nnodes = world.layout().nnodes();
  const auto load = [&]() -> Result<std::unique_ptr<Runner>> {
    FATHOM_TRY(ModelRunnerOptions options, plan_ranks(loaded, flags, needs, &world));
    WireWriter setup;
    write_setup({options.max_total_tokens, options.max_batched_tokens, options.max_model_len},
                setup);
    for (int node = 1; node < nnodes; ++node) world.send(node, setup.bytes());
    FATHOM_TRY(auto runner, ModelRunner::create(loaded.checkpoint, options));
    log_info("node 0 has its weights; waiting for the other nodes'");
    for (int node = 1; node < nnodes; ++node) FATHOM_RETURN_IF_ERROR(receive_from(world, node));
    return runner;
  };
  FATHOM_TRY(auto own, end_world_on_error<std::unique_ptr<Runner>>(*nodes, load));
  return std::make_unique<LeadingRunner>(
      std::move(nodes), std::move(own), flags.placement(),
      ExpertBalancerOptions{.rebalances = flags.eplb, .rebalance_steps = flags.eplb_steps});
}

}  // namespace fathom
