#include "engine/local_prefill.h"

#include <utility>

namespace fathom {
namespace {

// Hands pages to a mailbox as pieces of a ticket.
class MailboxExport : public PageExport {
 public:
  MailboxExport(const Ticket& ticket, std::shared_ptr<PieceMailbox> mailbox)
      : ticket_(ticket), mailbox_(std::move(mailbox)) {}

  bool send(int64_t index, std::span<const std::byte> rows) override {
    return mailbox_->put({.header = make_piece(ticket_, index, rows),
                          .rows = std::vector<std::byte>(rows.begin(), rows.end())});
  }

 private:
  const Ticket ticket_;
  std::shared_ptr<PieceMailbox> mailbox_;
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
    running_->requests.emplace(Key{ticket.id}, 0);
  }
  const auto id = prefill_->submit(
      prompt_request(std::move(order), std::make_shared<MailboxExport>(ticket, mailbox_)),
      [ticket, mailbox = mailbox_, running = running_](const Event& event) {
        if (!event.finish) return;
        {
          const std::lock_guard lock(running->mutex);
          running->requests.erase(Key{ticket.id});
        }
        if (*event.finish != FinishReason::kStop) mailbox->fail({ticket.id, event.error});
      });
  const std::lock_guard lock(running_->mutex);
  const auto entry = running_->requests.find(Key{ticket.id});
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
    const auto entry = running_->requests.find(Key{id});
    if (entry == running_->requests.end()) return;
    request = entry->second;
  }
  prefill_->abort(request);
}

}  // namespace fathom
