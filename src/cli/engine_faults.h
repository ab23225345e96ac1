// Where tests put faults between the engine and its model.
//
// The program `fathom` is linked with no_engine_faults.cc, which leaves everything as it is; the
// tests' program with tests/robustness/engine_faults.cc, which holds the list of faults. So nothing
// in the environment can break the program that people run.
#pragma once

#include <memory>

#include "engine/engine.h"
#include "engine/runner.h"

namespace fathom {

// Called once, before the engine is made.
std::unique_ptr<Runner> with_engine_faults(std::unique_ptr<Runner> runner, EngineOptions* options);

}  // namespace fathom
