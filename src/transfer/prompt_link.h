// Between an engine that decodes and whoever computes its prompts: orders go one way, pieces and
// failures come back.
//
// An order asks for the cache rows of tokens, nothing else. The decoding side computes the prompt's
// last token itself, so its sampler, its grammar, its log-probabilities and its drafts are never
// sent: they cannot be another request's. A page carries all that belongs to its tokens: latent
// rows, index keys, hidden states for the MTP layer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "transfer/ticket.h"

namespace fathom {

struct PromptOrder {
  Ticket ticket;
  std::vector<int32_t> tokens;  // the text, whose pages the ticket names
  std::string cache_salt;
  int32_t priority = 0;     // lower goes first
  std::string prefer = {};  // who should get it, by id or address, if it is there; is not sent
};

// Where orders go. Called by the engine's thread; does not block.
class PromptLink {
 public:
  virtual ~PromptLink() = default;
  // kUnavailable: nobody is there. Other errors: this order is refused.
  virtual Result<> order(PromptOrder order) = 0;
  // No piece of this ticket is wanted any more.
  virtual void cancel(const TicketId& id) = 0;
  // Whether the order is with somebody who is there and has not sent or given up all of it: then it
  // waits there, or is being computed, for as long as that takes.
  virtual bool holds(const TicketId& id) = 0;
};

}  // namespace fathom
