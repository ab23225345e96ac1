// A way to a prefill engine on which messages get lost, late, doubled, out of order, cut off or
// altered. Test code only.
#pragma once

#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "engine/local_prefill.h"

namespace fathom {

class LossyLink : public PromptLink {
 public:
  // `share`: of messages with each kind of fault.
  LossyLink(Engine& prefill, std::shared_ptr<PieceMailbox> mailbox, double share, uint32_t seed);
  ~LossyLink() override;

  // Lost orders and cancels are lost without a word.
  Result<> order(PromptOrder order) override;
  void cancel(const TicketId& id) override;
  // An order that was lost is held by nobody, nor is one of which pieces were lost on the way.
  bool holds(const TicketId& id) override { return link_.holds(id); }

 private:
  using Message = std::vector<std::byte>;

  void carry();
  void spoil(const Message& message);
  bool fault();

  const double share_;
  std::mt19937 random_;
  std::mutex random_mutex_;
  std::shared_ptr<PieceMailbox> sent_, received_;
  LocalPrefill link_;
  struct Waiting {
    Message bytes;
    uint32_t rounds = 0;  // of the carrier
  };
  std::vector<Waiting> waiting_;
  std::vector<Message> log_;
  std::atomic<bool> stopping_ = false;
  std::thread carrier_;
};

}  // namespace fathom
