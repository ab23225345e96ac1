// Prompts computed by another engine of the same process, or on behalf of one elsewhere.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>

#include "engine/engine.h"
#include "transfer/piece_receiver.h"
#include "transfer/prompt_link.h"

namespace fathom {

// The request that computes an order's prompt. Its pages go to `page_export`.
Request prompt_request(PromptOrder order, std::shared_ptr<PageExport> page_export);

// Sends orders to `prefill`, whose pages go to `receiver`. The engine outlives the link and every
// engine that has it. Any thread.
class LocalPrefill : public PromptLink {
 public:
  LocalPrefill(Engine& prefill, std::shared_ptr<PieceReceiver> receiver)
      : prefill_(&prefill), receiver_(std::move(receiver)), running_(std::make_shared<Running>()) {}

  Result<> order(PromptOrder order) override;
  void cancel(const TicketId& id) override;
  bool holds(const TicketId& id) override;

 private:
  // Shared with the requests' sinks, which may outlive the link.
  struct Running {
    std::mutex mutex;
    std::unordered_map<TicketId, RequestId, TicketIdHash> requests;  // 0: not known yet
  };

  Engine* prefill_;
  std::shared_ptr<PieceReceiver> receiver_;
  std::shared_ptr<Running> running_;
};

}  // namespace fathom
