// The roles of the two sites of one process, and how they change with the load.
//
// One site's lanes compute prompts, the other's decode. While the prefill site has a backlog and
// the decode site decodes nothing, decode lanes compute new prompts themselves; while the decode
// site is full and the prefill site has no backlog, prefill lanes take new requests whole. What a
// lane has begun it ends in any role, so a change needs no copy and changes no token.
//
// A change wants its condition at kRoleSteps steps' boundaries of the decode site in a row; the
// condition to change back is another one, so roles do not swing with every step.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace fathom {

inline constexpr int kRoleSteps = 8;

struct RoleLimits {
  int64_t prefill_step_rows = 1;  // rows of a full step of the prefill site, all its lanes
  int64_t prefill_slots = 1;      // most sequences of the prefill site
  int64_t decode_slots = 1;       // and of the decode site
  // Rows that are ordered and have not come, in full steps of the prefill site: from so many on
  // there is a backlog, and at most so many are none.
  int64_t backlog_from = 4, no_backlog_to = 1;
  // The decode site may begin to compute prompts while at most so many sequences decode, and orders
  // them again when more of its slots decode than one in so many.
  int64_t idle_to = 0, decode_share = 8;
};

// Load of the decode site, between two steps.
struct RoleLoad {
  int64_t rows_missing = 0;  // ordered from the prefill site and not yet here
  int64_t decoding = 0;      // running sequences whose rows are here
  bool is_full = false;      // a sequence waits for room, in slots or pages
  bool is_idle = false;      // it has no work at all: both roles are the sites' own at once
};

struct RoleStats {
  bool decode_computes = false;         // decode lanes compute prompts now
  bool prefill_takes = false;           // prefill lanes take requests now
  int64_t decode_changes = 0;           // of decode lanes, to computing prompts
  int64_t prefill_changes = 0;          // of prefill lanes, to taking requests
  int64_t prompts_kept = 0;             // computed by decode lanes for that
  int64_t requests_taken = 0;           // by prefill lanes for that
  std::vector<int> prefill_lanes = {};  // their numbers; the others decode
};

class Roles {
 public:
  explicit Roles(const RoleLimits& limits) : limits_(limits) {}

  // The decode site's thread.
  void update(const RoleLoad& load);
  // Whether the decode site computes the prompt that is to be ordered now; counts those.
  bool keep_prompt();

  // Any thread: whether the prefill site gets a new request of so many choices; those that it has
  // count until they end.
  bool prefill_takes(int64_t choices) const;
  void begin_choices(int64_t choices) { choices_ += choices; }
  void end_choices(int64_t choices) { choices_ -= choices; }
  void count_request() { ++requests_taken_; }

  RoleStats stats() const;

 private:
  // A condition's consecutive boundaries.
  struct Switch {
    std::atomic<bool> on{false};
    std::atomic<int64_t> changes{0};  // to on
    int held = 0;
    void update(bool wants_on, bool wants_off);
    void reset();
  };

  const RoleLimits limits_;
  Switch decode_computes_, prefill_takes_;
  std::atomic<int64_t> prompts_kept_{0}, requests_taken_{0};
  std::atomic<int64_t> choices_{0};  // that the prefill site has taken and not ended
};

}  // namespace fathom
