#include "engine/engine.h"

#include <atomic>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/random.h"
#include "engine/admission.h"
#include "engine/engine_loop.h"
#include "engine/sites.h"
#include "tokenizer/tokenizer.h"

namespace fathom {
namespace {

Result<> check_at_least(const char* field, int64_t value, int64_t low) {
  if (value >= low) return {};
  return invalid("{} is {}, must be {} or more", field, value, low);
}

// An engine that does not compute its prompts uses the copies of pages for them alone.
Result<> check_prefill(const EngineOptions& options, Runner& runner) {
  const PrefillOptions& prefill = options.prefill;
  if (prefill.link == nullptr) return {};
  FATHOM_CHECK(prefill.mailbox != nullptr, "a link without a mailbox");
  FATHOM_RETURN_IF_ERROR(check_at_least("prefill.least_rows", prefill.least_rows, 0));
  FATHOM_RETURN_IF_ERROR(check_at_least("prefill.most_rows_here", prefill.most_rows_here, 0));
  FATHOM_RETURN_IF_ERROR(check_at_least("prefill.max_attempts", prefill.max_attempts, 1));
  if (options.kv_offload_bytes > 0 || !options.kv_offload_dir.empty()) {
    return invalid(
        "kv_offload_bytes is {} and kv_offload_dir '{}': not where another engine "
        "computes the prompts",
        options.kv_offload_bytes, options.kv_offload_dir);
  }
  if (runner.page_transfer(0) == nullptr) {
    return invalid("this device cannot take pages that another engine has computed");
  }
  return {};
}

Result<> check_options(const EngineOptions& options, Runner& runner) {
  FATHOM_RETURN_IF_ERROR(check_at_least("max_num_seqs", options.max_num_seqs, 1));
  if (options.max_batched_tokens < options.max_num_seqs) {
    return invalid("max_batched_tokens is {}, must be at least max_num_seqs, {}",
                   options.max_batched_tokens, options.max_num_seqs);
  }
  FATHOM_RETURN_IF_ERROR(check_at_least("max_drafts", options.max_drafts, 0));
  FATHOM_RETURN_IF_ERROR(check_at_least("max_prompt_logit_rows", options.max_prompt_logit_rows, 1));
  FATHOM_RETURN_IF_ERROR(check_at_least("long_prompt_rows", options.long_prompt_rows, 0));
  FATHOM_RETURN_IF_ERROR(check_at_least("max_queued_requests", options.max_queued_requests, 1));
  FATHOM_RETURN_IF_ERROR(check_at_least("max_queued_tokens", options.max_queued_tokens, 0));
  FATHOM_RETURN_IF_ERROR(check_at_least("kv_offload_bytes", options.kv_offload_bytes, 0));
  FATHOM_RETURN_IF_ERROR(check_at_least("kv_offload_disk_bytes", options.kv_offload_disk_bytes, 0));
  FATHOM_RETURN_IF_ERROR(check_at_least("max_queue_time", options.max_queue_time.count(), 0));
  FATHOM_RETURN_IF_ERROR(check_at_least("max_total_time", options.max_total_time.count(), 0));
  FATHOM_RETURN_IF_ERROR(check_at_least("priority_ageing", options.priority_ageing.count(), 0));
  FATHOM_RETURN_IF_ERROR(check_at_least("the model's context length", runner.max_model_len(), 2));
  FATHOM_RETURN_IF_ERROR(check_at_least("the cache's number of pages", runner.num_pages(), 1));
  FATHOM_RETURN_IF_ERROR(check_prefill(options, runner));
  for (const int32_t id : options.eos_ids) {
    if (id < 0 || id >= runner.vocab_size()) {
      return invalid("the end-of-sequence id {} is outside the vocabulary of {}", id,
                     runner.vocab_size());
    }
  }
  return {};
}

// Whether pages can be sent to another engine: with a store the copies are the store's.
bool can_export(const EngineOptions& options, Runner& runner) {
  return options.kv_offload_bytes == 0 && options.kv_offload_dir.empty() &&
         runner.page_transfer(0) != nullptr;
}

// A lane's; null if no pages are offloaded.
Result<std::unique_ptr<PageStore>> make_store(const EngineOptions& options, Runner& runner,
                                              int lane) {
  if (options.kv_offload_bytes == 0 && options.kv_offload_dir.empty()) return nullptr;
  if (!options.prefix_caching) {
    return invalid("kv_offload_bytes and kv_offload_dir need prefix_caching, which is off");
  }
  PageTransfer* const transfer = runner.page_transfer(lane);
  if (transfer == nullptr) return invalid("this device cannot offload pages to host memory");
  return PageStore::create({.host_bytes = options.kv_offload_bytes,
                            .directory = options.kv_offload_dir,
                            .disk_bytes = options.kv_offload_disk_bytes,
                            .num_stores = runner.num_lanes()},
                           *transfer);
}

Result<std::vector<std::unique_ptr<PageStore>>> make_stores(const EngineOptions& options,
                                                            Runner& runner) {
  std::vector<std::unique_ptr<PageStore>> stores;
  for (int lane = 0; lane < runner.num_lanes(); ++lane) {
    FATHOM_TRY(stores.emplace_back(), make_store(options, runner, lane));
  }
  return stores;
}

}  // namespace

struct Engine::Parts {
  Parts(const EngineOptions& options, std::unique_ptr<Runner> runner,
        std::vector<std::unique_ptr<PageStore>> stores,
        std::shared_ptr<const Tokenizer> the_tokenizer)
      : tokenizer(std::move(the_tokenizer)),
        limits{.vocab_size = runner->vocab_size(),
               .max_model_len = runner->max_model_len(),
               .num_pages = runner->num_pages(),
               .num_lanes = runner->num_lanes(),
               .can_export = can_export(options, *runner),
               .eos_ids = options.eos_ids,
               .tokenizer = tokenizer.get()},
        loop(options, std::move(runner), std::move(stores)) {}

  std::optional<Sites> sites;  // outlives the loop, whose prompts its engine computes
  std::shared_ptr<const Tokenizer> tokenizer;
  AdmissionLimits limits;
  // Unseeded requests get seeds from one random base and a counter.
  uint64_t seed_base = std::random_device{}() * 0x100000000ull + std::random_device{}();
  std::atomic<uint64_t> num_seeds{0};
  EngineLoop loop;
  std::mutex join_mutex;
  std::thread thread;
};

Result<std::unique_ptr<Engine>> Engine::create(const EngineOptions& options,
                                               std::unique_ptr<Runner> runner,
                                               std::shared_ptr<const Tokenizer> tokenizer) {
  FATHOM_CHECK(runner != nullptr, "an engine needs a runner");
  FATHOM_RETURN_IF_ERROR(check_options(options, *runner));
  FATHOM_TRY(auto stores, make_stores(options, *runner));
  auto parts =
      std::make_unique<Parts>(options, std::move(runner), std::move(stores), std::move(tokenizer));
  parts->thread = std::thread([loop = &parts->loop] { loop->run(); });
  return std::unique_ptr<Engine>(new Engine(std::move(parts)));
}

Result<std::unique_ptr<Engine>> Engine::create_separated(
    const EngineOptions& options, SiteRunners runners, const SitesOptions& sites,
    std::shared_ptr<const Tokenizer> tokenizer) {
  FATHOM_CHECK(runners.prefill != nullptr && runners.decode != nullptr, "a site needs a runner");
  FATHOM_TRY(Sites both,
             Sites::create(options, std::move(runners.prefill), *runners.decode, sites, tokenizer));
  FATHOM_TRY(auto engine,
             create(both.decode_options(options), std::move(runners.decode), std::move(tokenizer)));
  engine->parts_->sites = std::move(both);
  return engine;
}

Engine::Engine(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

Engine::~Engine() { stop(); }

Result<RequestId> Engine::submit(Request request, EventSink sink) {
  FATHOM_CHECK(sink != nullptr, "a request needs a sink");
  if (parts_->sites) {
    FATHOM_RETURN_IF_ERROR(parts_->sites->choose_lane(request));
    if (parts_->sites->takes(request)) {
      FATHOM_RETURN_IF_ERROR(parts_->loop.inbox().is_open());
      return parts_->sites->submit(std::move(request), std::move(sink));
    }
  }
  const auto now = parts_->loop.now();
  const uint64_t seed = mix64(parts_->seed_base + parts_->num_seeds.fetch_add(1));
  FATHOM_TRY(std::unique_ptr<ActiveRequest> active,
             make_active_request(std::move(request), std::move(sink), parts_->limits, seed));
  for (const auto& sequence : active->sequences) sequence->timings.queued = now;
  return parts_->loop.inbox().push(std::move(active));
}

Result<> Engine::has_room() {
  Inbox& inbox = parts_->loop.inbox();
  if (!parts_->sites) return inbox.has_room();
  FATHOM_RETURN_IF_ERROR(parts_->sites->is_alive());
  return parts_->sites->takes({}) ? inbox.is_open() : inbox.has_room();
}

void Engine::abort(RequestId request) {
  if (parts_->sites && parts_->sites->has(request)) return parts_->sites->prefill().abort(request);
  parts_->loop.inbox().abort(request);
}

EngineStats Engine::stats() const {
  EngineStats stats = parts_->loop.stats();
  return parts_->sites ? parts_->sites->with_prefill(std::move(stats)) : stats;
}

int Engine::num_sites() const { return parts_->sites ? 2 : 1; }

EngineProgress Engine::progress(int site) const {
  return site == 0 ? parts_->loop.progress() : parts_->sites->prefill().progress();
}

void Engine::flush_prefix_cache() {
  parts_->loop.inbox().flush();
  if (parts_->sites) parts_->sites->prefill().flush_prefix_cache();
}

bool Engine::is_dead() const {
  return parts_->loop.inbox().is_dead() || (parts_->sites && parts_->sites->prefill().is_dead());
}

// The prefill site's death is seen at the end of the wait.
bool Engine::wait_until_dead(std::chrono::nanoseconds timeout) {
  return parts_->loop.inbox().wait_until_dead(timeout) || is_dead();
}

// The prefill site computes the decode site's prompts until that is empty.
bool Engine::drain(std::chrono::nanoseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  parts_->loop.inbox().refuse();
  if (!parts_->loop.inbox().wait_until_empty(timeout)) return false;
  return !parts_->sites || parts_->sites->prefill().drain(end - std::chrono::steady_clock::now());
}

void Engine::stop() {
  stop_loop();
  if (parts_->sites) parts_->sites->prefill().stop();
}

void Engine::stop_loop() {
  parts_->loop.inbox().stop();
  const std::lock_guard lock(parts_->join_mutex);
  if (!parts_->thread.joinable()) return;
  FATHOM_CHECK(std::this_thread::get_id() != parts_->thread.get_id(),
               "the engine cannot be stopped from an event's sink");
  parts_->thread.join();
}

}  // namespace fathom
