// Prompts computed by another process, on either side: from the flags to the transfer's parts.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "cli/loaded_engine.h"
#include "cli/transfer_flags.h"
#include "server/openai/served_model.h"
#include "transfer/tcp/prefill_peers.h"
#include "transfer/tcp/transfer_server.h"

namespace fathom {

// The transfer's parts of one server. Declared after what owns the engine: orders stop before it
// is destroyed.
class Separated {
 public:
  Separated(TransferPlan plan, ModelFlags model)
      : plan_(std::move(plan)), model_(std::move(model)) {}

  // For EngineNeeds::prefill. Connects to the prefill side, and fails if that refuses this one.
  Result<PrefillOptions> connect(const LoadedEngine& loaded);

  // Takes orders from now on, if the flags say so. `loaded` has its engine, which outlives this.
  Result<> listen(const LoadedEngine& loaded);

  // Where this server takes prompts of others, after listen().
  TransferPort port() const;

  const TransferPlan& plan() const { return plan_; }
  // For EngineNeeds::sites.
  std::optional<SitesOptions> sites() const;

  // Appends the metrics of the transfer. Any thread, once the parts are there.
  void write_metrics(std::string_view labels, const EngineStats& engine, std::string& out) const;

 private:
  const TransferPlan plan_;
  const ModelFlags model_;
  std::shared_ptr<PrefillPeers> peers_;  // null: this side computes its prompts
  std::unique_ptr<TransferServer> server_;
  uint64_t engine_ = 0;  // of server_
};

}  // namespace fathom
