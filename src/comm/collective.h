// The kinds of collectives: what ranks may meet for.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace fathom {

// Values are part of the frames between processes. kAllReduceGather is the second phase of a large
// all_reduce: a kind of its own, because its parts differ in size.
enum class Collective : uint8_t {
  kBarrier = 0,
  kAllReduce = 1,
  kAllReduceGather = 2,
  kReduceScatter = 3,
  kAllGather = 4,
  kArgmax = 5,
  kDispatch = 6,
  kCombine = 7,
  kPages = 8,
};
inline constexpr int kNumCollectives = 9;

// "all_reduce"; "unknown collective 77" for a number that is none.
std::string name_of(Collective kind);

// Whether every rank must give the same number of bytes.
constexpr bool needs_equal_bytes(Collective kind) {
  return kind == Collective::kBarrier || kind == Collective::kAllReduce ||
         kind == Collective::kReduceScatter || kind == Collective::kArgmax;
}

// Which collective of a group a rank is in, or was in last. Number 1 is the group's first; 0: none
// yet. `bytes` counts all that the rank gives. `plan`: Group::set_plan().
struct CollectiveRecord {
  uint64_t number = 0;
  Collective kind = Collective::kBarrier;
  uint64_t bytes = 0;
  uint64_t plan = 0;

  bool operator==(const CollectiveRecord&) const = default;
};

// "all_reduce #118 (14336 bytes)"; "no collective yet".
std::string to_string(const CollectiveRecord& record);

// A record, without its plan, that its rank writes and any thread reads. A reader may see one
// collective's number and kind beside the bytes of its neighbour: it is for messages to people.
class SharedRecord {
 public:
  void set(const CollectiveRecord& record) {
    which_.store(record.number << 8 | static_cast<uint8_t>(record.kind), std::memory_order_relaxed);
    bytes_.store(record.bytes, std::memory_order_relaxed);
  }
  CollectiveRecord get() const {
    const uint64_t which = which_.load(std::memory_order_relaxed);
    return {which >> 8, static_cast<Collective>(which & 0xFF),
            bytes_.load(std::memory_order_relaxed)};
  }

 private:
  std::atomic<uint64_t> which_{0};
  std::atomic<uint64_t> bytes_{0};
};

}  // namespace fathom
