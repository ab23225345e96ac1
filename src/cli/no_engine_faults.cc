#include "cli/engine_faults.h"

namespace fathom {

std::unique_ptr<Runner> with_engine_faults(std::unique_ptr<Runner> runner, EngineOptions*) {
  return runner;
}

std::function<void(int, Collective, uint64_t)> meeting_fault() { return nullptr; }

}  // namespace fathom
