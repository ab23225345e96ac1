// What a scheduler knows of an engine that computes prompts for it.
#pragma once

#include "engine/sequence.h"

namespace fathom {

class RemotePrefill {
 public:
  virtual ~RemotePrefill() = default;

  // Whether the rows of the sequence's tokens come from there: from `computed` on, without the last
  // token's, which the sequence computes itself.
  virtual bool takes(const Sequence& sequence) const = 0;

  // Orders them and sets the sequence's ticket. It holds pages for all its tokens, which are
  // quarantined from now on.
  virtual void begin(Sequence& sequence) = 0;

  // Ends the sequence's order, if it has one: its pages are its own again, and its ticket is 0.
  virtual void cancel(Sequence& sequence) = 0;
};

}  // namespace fathom
