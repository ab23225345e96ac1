// What speculation did, for reports.
#pragma once

#include <string>

#include "base/json.h"
#include "engine/engine.h"

namespace fathom {

// "Drafts: 1204 of 1230 accepted (97.9 %; by position 97.9 % of the windows), 1.98 tokens a
// window" and a line end; empty without drafts.
std::string speculation_line(const SpeculationStats& stats);

// Adds "speculation": {drafts, draft_tokens, accepted_tokens, accepted_per_pos}, if there were any.
void add_speculation(const SpeculationStats& stats, json::object& object);

}  // namespace fathom
