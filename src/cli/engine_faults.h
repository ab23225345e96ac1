// The hook through which tests inject faults between the engine and its model.
//
// `fathom` is linked with no_engine_faults.cc, which does nothing; the tests' program with
// tests/robustness/engine_faults.cc, which holds the list of faults. So no environment variable can
// inject a fault into the released program.
#pragma once

#include <memory>

#include "comm/group.h"
#include "engine/engine.h"
#include "engine/runner.h"

namespace fathom {

// Called once, before the engine is created.
std::unique_ptr<Runner> with_engine_faults(std::unique_ptr<Runner> runner, EngineOptions* options);

// What ranks do at their collectives (GroupOptions::at_meeting); null: nothing.
MeetingHook meeting_fault();

}  // namespace fathom
