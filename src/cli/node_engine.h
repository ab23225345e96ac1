// One engine over several nodes, that is processes: how they find together, and what those other
// than node 0 do.
#pragma once

#include <functional>
#include <memory>

#include "base/status.h"
#include "cli/loaded_engine.h"
#include "cli/model_flags.h"
#include "engine/leading_runner.h"

namespace fathom {

// A command that runs a model. On node 0, or without other nodes, this is `lead`; on another node
// it is the work that node 0 sends, until node 0 ends. Returns the exit status: kExitDead if
// another node failed or does not answer.
Result<int> lead_or_follow(const ModelFlags& flags, const std::function<Result<int>()>& lead);

// Waits until all nodes have come. Those that differ in version, model, flags or instruction set
// are refused, with both values. `loaded` is as open_model() returns it.
Result<std::unique_ptr<NodeWorld>> join_nodes(const NodePlace& place, const LoadedEngine& loaded,
                                              const ModelFlags& flags);

// Node 0: the ranks here and elsewhere as one runner. Tells the others what to load, loads what
// belongs here, and waits for them.
Result<std::unique_ptr<Runner>> load_nodes(std::unique_ptr<NodeWorld> nodes, LoadedEngine& loaded,
                                           const ModelFlags& flags, const EngineNeeds& needs);

}  // namespace fathom
