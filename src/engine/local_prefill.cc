#include "engine/local_prefill.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace fathom {
namespace {

// Hands pages to a receiver as pieces of a ticket.
class PieceExport : public PageExport {
 public:
  PieceExport(const Ticket& ticket, std::shared_ptr<PieceReceiver> receiver)
      : ticket_(ticket), receiver_(std::move(receiver)) {}

  bool send(int64_t index, std::shared_ptr<LentRows> rows, int64_t cached_tokens) override {
    const bool is_own = rows->is_own();
    if (!is_own) lent_.push_back(rows);
    const PieceHeader header = rows->read([&](std::span<const std::byte> all) {
      return make_piece(ticket_, index, all, cached_tokens);
    });
    if (receiver_->put(header, lend(std::move(rows)))) return true;
    if (!is_own) lent_.pop_back();
    return false;
  }
  bool has_lent() override {
    std::erase_if(lent_, [](const auto& rows) { return !rows->is_lent(); });
    return !lent_.empty();
  }
  void recall() noexcept override {
    for (const auto& rows : lent_) rows->recall();
    lent_.clear();
  }

 private:
  const Ticket ticket_;
  std::shared_ptr<PieceReceiver> receiver_;
  std::vector<std::shared_ptr<LentRows>> lent_;
};

}  // namespace

Request prompt_request(PromptOrder order, std::shared_ptr<PageExport> page_export) {
  Request request;
  request.prompt_ids = std::move(order.tokens);
  request.sampling.max_tokens = 1;
  request.priority = order.priority;
  request.cache_salt = std::move(order.cache_salt);
  request.page_export = std::move(page_export);
  request.export_from = order.ticket.first_page;
  return request;
}

Result<> LocalPrefill::order(PromptOrder order) {
  const Ticket ticket = order.ticket;
  {
    const std::lock_guard lock(running_->mutex);
    running_->requests.emplace(ticket.id, 0);
  }
  const auto id = prefill_->submit(
      prompt_request(std::move(order), std::make_shared<PieceExport>(ticket, receiver_)),
      [ticket, receiver = receiver_, running = running_](const Event& event) {
        if (!event.finish) return;
        {
          const std::lock_guard lock(running->mutex);
          running->requests.erase(ticket.id);
        }
        if (*event.finish == FinishReason::kStop) {
          receiver->done(ticket.id);
        } else {
          receiver->fail({ticket.id, event.error});
        }
      });
  const std::lock_guard lock(running_->mutex);
  const auto entry = running_->requests.find(ticket.id);
  if (!id) {
    if (entry != running_->requests.end()) running_->requests.erase(entry);
    return tl::unexpected(id.error());
  }
  if (entry != running_->requests.end()) entry->second = *id;
  return {};
}

void LocalPrefill::cancel(const TicketId& id) {
  RequestId request = 0;
  {
    const std::lock_guard lock(running_->mutex);
    const auto entry = running_->requests.find(id);
    if (entry == running_->requests.end()) return;
    request = entry->second;
  }
  prefill_->abort(request);
}

bool LocalPrefill::holds(const TicketId& id) {
  const std::lock_guard lock(running_->mutex);
  return running_->requests.contains(id);
}

}  // namespace fathom
