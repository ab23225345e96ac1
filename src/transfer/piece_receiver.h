// Where the pages of orders go, and the news of their ends.
#pragma once

#include <memory>

#include "base/status.h"
#include "transfer/lent_rows.h"
#include "transfer/ticket.h"

namespace fathom {

struct FailedOrder {
  TicketId ticket;
  Status why;
};

// Called by the thread of the engine that computes the prompts; does not block.
class PieceReceiver {
 public:
  virtual ~PieceReceiver() = default;
  // Reads the rows until it destroys them, from any thread. False, and nothing has changed: the
  // window is full.
  virtual bool put(const PieceHeader& header, std::shared_ptr<LentRows> rows) = 0;
  // done(): the order's last piece has been put; fail(): the order has been given up. At most one
  // of them is called per ticket; no call for that ticket follows.
  virtual void done(const TicketId& id) = 0;
  virtual void fail(FailedOrder failed) = 0;
};

}  // namespace fathom
