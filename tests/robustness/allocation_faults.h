// Allocations that fail, one after another: the program that is linked with allocation_faults.cc
// has its own operator new.
#pragma once

#include <cstdint>

namespace fathom {

// What the file behind the descriptor begins with; a test maps it too and sets it.
struct AllocationFaults {
  int64_t countdown = 0;  // allocations until some fail; 0: none will
  int64_t length = 0;     // so many fail then
};

// From here on the file decides. False if it cannot be mapped.
bool control_allocations_by(int descriptor);

}  // namespace fathom
