// The work of a node other than node 0: it computes the steps that node 0 sends.
#pragma once

#include "base/status.h"
#include "engine/leading_runner.h"
#include "engine/runner.h"

namespace fathom {

// Runs what node 0 sends on `own`, which is as LeadingRunner's, and sends the tokens that it
// samples, until node 0 says goodbye. `max_rows`: of a lane in a step. Every step is checked:
// epoch, number, the hash of its plan, and that nothing in it leads outside of the model. An error
// has ended the world; it names the rank that failed and what this node was doing.
Result<> follow_steps(NodeWorld& nodes, Runner& own, const Placement& placement, int64_t max_rows);

}  // namespace fathom
