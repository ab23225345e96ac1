#include "cli/engine_faults.h"

namespace fathom {

std::unique_ptr<Runner> with_engine_faults(std::unique_ptr<Runner> runner, EngineOptions*) {
  return runner;
}

MeetingHook meeting_fault() { return nullptr; }

}  // namespace fathom
