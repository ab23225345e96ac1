#include "comm/collective.h"

#include <fmt/format.h>

namespace fathom {

std::string name_of(Collective kind) {
  switch (kind) {
    case Collective::kBarrier:
      return "barrier";
    case Collective::kAllReduce:
      return "all_reduce";
    case Collective::kAllReduceGather:
      return "all_reduce's second phase";
    case Collective::kReduceScatter:
      return "reduce_scatter";
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kArgmax:
      return "argmax";
    case Collective::kDispatch:
      return "dispatch";
    case Collective::kCombine:
      return "combine";
    case Collective::kPages:
      return "pages";
  }
  return fmt::format("unknown collective {}", static_cast<int>(kind));
}

std::string to_string(const CollectiveRecord& record) {
  if (record.number == 0) return "no collective yet";
  return fmt::format("{} #{} ({} bytes)", name_of(record.kind), record.number, record.bytes);
}

}  // namespace fathom
