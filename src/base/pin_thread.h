// Pins threads of benchmarks to CPUs.
#pragma once

#include <pthread.h>
#include <sched.h>

#include "base/check.h"

namespace fathom {

// The calling thread, and those that it starts later. The CPU must be there.
inline void pin_thread(int cpu) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(cpu, &cpus);
  FATHOM_CHECK(pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus) == 0,
               "CPU {} is not there", cpu);
}

}  // namespace fathom
