// The engine: requests in, events out. It never sees HTTP or JSON.
//
// Owns its thread, the runner, the scheduler and all sequences. The caller's side (submit(),
// has_room(), abort(), stats(), flush_prefix_cache(), is_dead(), wait_until_dead(), drain()) may be
// called from any thread; everything else happens on the engine's thread, whose loop is: schedule,
// run, postprocess.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "cache/cache_observer.h"
#include "engine/request.h"
#include "engine/roles.h"
#include "engine/runner.h"
#include "transfer/arrivals.h"
#include "transfer/piece_mailbox.h"
#include "transfer/prompt_link.h"

namespace fathom {

class Tokenizer;

inline constexpr int32_t kMostPriorityLevels = 10;

// After this many consecutive steps that fail with kInternal the engine counts as dead: the
// device's errors persist although the runner does not report it as lost.
inline constexpr int64_t kMostFailedSteps = 16;

// Where an engine's prompts are computed, if not by itself.
struct PrefillOptions {
  std::shared_ptr<PromptLink> link = {};       // null: by itself
  std::shared_ptr<PieceMailbox> mailbox = {};  // where the link's pieces come
  uint64_t form = 0;                           // of cache pages; equal on both sides
  bool with_digests = false;                   // of pieces
  // A prompt of which fewer rows are missing is computed here.
  int64_t least_rows = 64;
  // Where nobody else can compute them: a prompt of which so many rows are missing is computed
  // here, a longer one only if nothing else runs in its lane. Others end with kUnavailable.
  int64_t most_rows_here = 512;
  int64_t max_attempts = 3;  // orders of a prompt that fail before that; 1 or more
  // An order of which nothing has come for so long has failed, unless the link still holds it.
  std::chrono::nanoseconds patience = std::chrono::seconds(30);
  std::shared_ptr<Roles> roles = {};  // of the two engines of one process; null: they stay
};

struct EngineOptions {
  // Limits of each lane: sequences that run together (each of a request's n choices is one), and
  // rows per step, at least max_num_seqs.
  int64_t max_num_seqs = 256;
  int64_t max_batched_tokens = 2048;
  // Long prompts (more than two full steps of work) together get this much work per step while
  // there are other sequences, counted in rows without context. 0: an eighth of max_batched_tokens,
  // with which a 100,000-token prompt at most triples the others' p99 TTFT (fairness_test.cc). A
  // larger value favours long prompts, a smaller one the others.
  int64_t long_prompt_rows = 0;
  int64_t max_prompt_logit_rows = 64;  // prompt positions per step whose logits are wanted
  int64_t max_queued_requests = 512;   // submitted and not yet started; more are refused
  int64_t max_queued_tokens = 0;  // prompt tokens of the queued requests; 0: four times the cache
  // Requests that have not started, or not ended, this long after submit() are aborted; 0: never.
  std::chrono::nanoseconds max_queue_time = std::chrono::seconds(120);
  std::chrono::nanoseconds max_total_time = std::chrono::minutes(30);
  // Keeps pages when their sequences have ended, for later requests that begin with the same
  // tokens. If false, only the choices of one request share pages.
  bool prefix_caching = true;
  // Pages evicted from the pool are kept in up to kv_offload_bytes of host memory, and below that
  // in up to kv_offload_disk_bytes of files under kv_offload_dir, all lanes together. They are
  // copied back instead of being recomputed.
  int64_t kv_offload_bytes = 0;
  std::string kv_offload_dir = {};  // empty: no files
  int64_t kv_offload_disk_bytes = 0;
  // Ageing: waiting this long is worth one priority level, so a request goes before one of the next
  // lower level (a priority larger by 1) that was submitted up to this much earlier. 0: no ageing.
  // Priorities are clamped to +-kMostPriorityLevels, so no request is overtaken by one submitted
  // more than 2 * kMostPriorityLevels times this later.
  std::chrono::nanoseconds priority_ageing = std::chrono::seconds(5);
  // Drafts of a sequence in a step, at most the runner's max_drafts().
  int64_t max_drafts = kMaxDrafts;
  // Whether a step has fewer where they do not pay, by measured acceptance and step times.
  bool adapts_drafts = false;
  std::vector<int32_t> eos_ids = {};  // any of them ends a sequence
  PrefillOptions prefill = {};
  // [lanes]: who is told what each lane's prefix cache has; empty: nobody.
  std::vector<std::shared_ptr<CacheObserver>> cache_observers = {};
  RequestId ids_after = 0;    // requests' ids are larger
  int64_t preempt_every = 0;  // fault injection: one sequence every so many steps; 0: off
  std::function<std::chrono::steady_clock::time_point()> clock =
      {};  // for tests; empty: steady_clock
};

// Upper bounds, in rows, of the buckets of EngineStats::steps_by_rows. The bounds are vLLM's.
inline constexpr int64_t kStepRowBounds[] = {1,   8,    16,   32,   64,   128,  256,
                                             512, 1024, 2048, 4096, 8192, 16384};

// Statistics of one lane.
struct LaneStats {
  int64_t running = 0, waiting = 0;
  int64_t pages_total = 0, pages_used = 0, pages_cached = 0, pages_in_transfer = 0;
  int64_t pages_quarantined = 0;
  int64_t preemptions = 0;
};

// Prompts that another engine computes.
struct PrefillStats {
  int64_t orders = 0, arrived = 0;  // orders sent, and those whose pages have all come
  int64_t failed = 0;               // orders that were given up, but not by their sequences
  int64_t computed_here = 0;        // prompts computed here after orders had failed
  int64_t refused = 0;              // choices that ended because orders had failed
  int64_t pages_sent = 0;           // to other engines
  int64_t cached_tokens = 0;  // of prompts: found in the other side's cache and not in this one's
  // This engine's own work for other engines: their prompts that wait or are computed here now, and
  // the tokens of those that have started, which EngineStats::prompt_tokens counts too.
  int64_t exports = 0, export_prompt_tokens = 0, export_cached_tokens = 0;
  std::array<int64_t, kNumPieceVerdicts> pieces{};  // by PieceVerdict
};

// Drafts that the steps had as rows, and what became of them. A draft behind a sequence's end does
// not count as accepted.
struct SpeculationStats {
  int64_t drafts = 0;        // windows: a sequence's drafts in one step
  int64_t draft_tokens = 0;  // drafts in them
  int64_t accepted_tokens = 0;
  std::array<int64_t, kMaxDrafts> accepted_per_pos{};  // the i-th draft of its window
};

struct EngineStats {
  int64_t running = 0, waiting = 0;  // sequences; waiting includes preempted ones
  int64_t queued_requests = 0, queued_tokens = 0;
  int64_t pages_total = 0, pages_used = 0;
  int64_t pages_cached = 0;       // at refcount 0, kept for reuse
  int64_t pages_in_transfer = 0;  // being copied to or from host memory
  int64_t pages_quarantined = 0;  // wait for rows that another engine computes; all others are free
  int64_t pages_stored = 0;       // in host memory and files
  int64_t steps = 0, prompt_tokens = 0, generated_tokens = 0, preemptions = 0;
  double step_seconds = 0;  // total time with a step in flight
  int64_t rows = 0;         // of all steps
  // steps_by_rows[i]: steps of at most kStepRowBounds[i] rows and more than the bound before; the
  // last bucket counts all larger steps.
  std::array<int64_t, std::size(kStepRowBounds) + 1> steps_by_rows{};
  int64_t cached_tokens = 0;                    // prompt tokens found in the cache, not computed
  int64_t prefix_queries = 0, prefix_hits = 0;  // prompt tokens looked up in the cache, and found
  int64_t prefix_returns = 0;                   // pages loaded back from host memory or files
  int64_t prefix_evictions = 0;                 // pages evicted from the pool
  int64_t stopped = 0, length = 0, aborted = 0, failed = 0;  // choices, by finish reason
  int64_t rejected = 0;              // requests refused because the queue was full
  int64_t expired = 0;               // requests aborted by a deadline
  double last_step_age_seconds = 0;  // since the last step ended
  SpeculationStats speculation;
  PrefillStats prefill;
  std::vector<LaneStats> lanes;
  int64_t sequences_moved = 0;         // to another lane
  int64_t pages_copied = 0;            // from another lane's pool
  std::optional<ExpertStats> experts;  // where tokens go to ranks of experts
  std::optional<RoleStats> roles;      // where lanes have roles
  // Shape of the running step, or of the last one. Identifies a step that never ends.
  int64_t step_sequences = 0, step_rows = 0;
  int64_t step_longest = 0;  // length of its longest sequence in tokens, with this step's
};

// Two sites of one process: lanes that compute prompts, and lanes that decode. Both have the same
// model in the same types.
struct SitesOptions {
  std::vector<int> prefill_lanes, decode_lanes;  // their numbers among all lanes, by site
  int64_t window_bytes = int64_t{64} << 20;      // pages that may wait to be copied
  bool with_digests = false;
  RoleLimits roles = {};  // its rows and slots are the runners'
};

struct SiteRunners {
  std::unique_ptr<Runner> prefill, decode;
};

// Whether the engine gets on.
struct EngineProgress {
  // Grows with every step that has ended, and while all work waits for another engine.
  int64_t steps = 0;
  bool has_work = false;  // some request has not ended
};

class Engine {
 public:
  // The tokenizer may be null: then requests have ids only, no text, and stop strings are refused.
  // Errors: an option out of range, or an offload store that cannot be created.
  static Result<std::unique_ptr<Engine>> create(const EngineOptions& options,
                                                std::unique_ptr<Runner> runner,
                                                std::shared_ptr<const Tokenizer> tokenizer);
  // An engine that decodes, and within it one on whose lanes its prompts are computed; `options`
  // are of both, and of cache_observers all lanes'. Their roles change with the load (roles.h).
  // Figures are those of both sites together, lanes in the order of their numbers.
  static Result<std::unique_ptr<Engine>> create_separated(
      const EngineOptions& options, SiteRunners runners, const SitesOptions& sites,
      std::shared_ptr<const Tokenizer> tokenizer);
  // Aborts all requests (each gets its last event) and joins the thread.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Validates the request, queues it and returns. Errors: kInvalidArgument if the request can never
  // run, kResourceExhausted if the queue is full, kUnavailable if the engine is draining, stopped
  // or dead. After an error the sink is never called.
  Result<RequestId> submit(Request request, EventSink sink);

  // Returns the error that submit() would give to any request now. Lets a caller refuse before it
  // builds a request, so that a full queue costs little.
  Result<> has_room();

  // Ends a request at the next step boundary: its unfinished choices get their last event, with
  // kAbort. Unknown and finished requests are ignored.
  void abort(RequestId request);

  EngineStats stats() const;
  // For a thread that watches the engine: does not allocate memory, and so does not throw. `site`:
  // 0, and 1 where there are two.
  EngineProgress progress(int site = 0) const;
  static constexpr int kMostSites = 2;
  int num_sites() const;

  // Drops all cached prefixes at refcount 0, at the next step boundary.
  void flush_prefix_cache();

  // Whether the engine is dead: its device is lost, or kMostFailedSteps consecutive steps have
  // failed. A dead engine has ended all its requests, and refuses new ones, with kUnavailable. It
  // never recovers.
  bool is_dead() const;

  // Waits until the engine is dead; false on timeout.
  bool wait_until_dead(std::chrono::nanoseconds timeout);

  // Refuses new requests and waits until all have ended; false on timeout.
  bool drain(std::chrono::nanoseconds timeout);

  // Refuses new requests, aborts all and joins the thread. Must not be called from a sink.
  void stop();

 private:
  struct Parts;
  explicit Engine(std::unique_ptr<Parts> parts);
  void stop_loop();
  std::unique_ptr<Parts> parts_;
};

}  // namespace fathom
