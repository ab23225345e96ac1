// Pieces through UCX: shared memory between two processes of one machine, or what UCX_TLS names.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "transfer/piece_lane.h"

namespace fathom {

// kUnavailable: this program was built without UCX, or UCX cannot be used on this machine.
Result<> check_ucx();

// A MakeLane. Errors are those of check_ucx(), and UCX's own.
Result<std::unique_ptr<PieceLane>> make_ucx_lane(int64_t page_bytes, uint64_t key);

}  // namespace fathom
