#include "grammar/grammar_compiler.h"

#include <sys/resource.h>
#include <xgrammar/compiler.h>
#include <xgrammar/config.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <future>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "base/out_of_memory.h"
#include "grammar/compiled_grammar_parts.h"
#include "grammar/convert.h"
#include "grammar/grammar_cache.h"
#include "grammar/markup_tokens.h"
#include "tokenizer/tokenizer.h"

namespace fathom {
namespace {

using Clock = std::chrono::steady_clock;
using Compiled = GrammarCompiler::Compiled;

// Limit on a grammar's states before masks are computed, about 400 bytes each. Each state may get a
// mask of the vocabulary's size, 16 KB for 128,000 tokens; this limit keeps them below 200 MB.
constexpr int64_t kMaxStateBytes = 4 << 20;

// XGrammar's own limit is 10,000, which overflows a stack of 8 MB under a sanitizer. Input within
// the text limits needs less than a tenth of this.
constexpr int kMaxRecursion = 4000;

xgrammar::TokenizerInfo vocabulary(const MarkupTokens& markup) {
  const std::vector<std::string>& texts = markup.vocabulary();
  return {texts, xgrammar::VocabType::RAW, static_cast<int>(texts.size()), std::vector<int32_t>()};
}

std::string key_of(const GrammarSpec& spec) {
  std::string key(1, static_cast<char>('0' + static_cast<int>(spec.kind)));
  if (spec.kind != GrammarSpec::Kind::kChoice) return key + spec.text;
  for (const std::string& choice : spec.choices) key += fmt::format("{}:{}", choice.size(), choice);
  return key;
}

// Larger than any accepted spec: refused before it is copied.
bool is_oversized(const GrammarSpec& spec) {
  constexpr size_t kMaxBytes = 1 << 20;
  size_t bytes = spec.text.size();
  for (const std::string& choice : spec.choices) bytes += choice.size() + 1;
  return bytes > kMaxBytes;
}

// Lowers the priority of the calling thread and of threads that it creates (on Linux, priority is
// per thread). Compilation then yields to token computation but still progresses: it gets a quarter
// of a contended core. With a lower priority, the largest allowed grammars would miss their
// deadline beside an engine that uses all cores.
void lower_priority() {
  constexpr int kNicer = 5;
  setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + kNicer);
}

struct Job {
  GrammarSpec spec;
  std::string key;
  GrammarCompiler::Done done;
  Clock::time_point deadline;
  bool has_result = false;  // guarded by Parts::mutex
};

}  // namespace

struct GrammarCompiler::Parts {
  Parts(const std::shared_ptr<const Tokenizer>& the_tokenizer, int64_t vocab_size,
        const GrammarCompilerOptions& the_options)
      : options(the_options),
        mask_threads(
            options.threads_a_grammar > 0
                ? options.threads_a_grammar
                : static_cast<int>(std::clamp(std::thread::hardware_concurrency() / 2, 1u, 8u))),
        markup(*the_tokenizer, vocab_size),
        tokens(vocabulary(markup)),
        cache(options.cache_bytes) {
    xgrammar::SetMaxRecursionDepth(kMaxRecursion);
    for (int i = 0; i < options.num_threads; ++i) threads.emplace_back([this] { work(); });
    threads.emplace_back([this] { watch_deadlines(); });
  }

  ~Parts() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    work_arrived.notify_all();
    deadline_arrived.notify_all();
    for (std::thread& thread : threads) thread.join();
    for (const auto& job : unfinished) {
      if (!std::exchange(job->has_result, true)) {
        job->done(error(Code::kUnavailable, "the grammar compiler is shutting down"));
      }
    }
  }

  void finish(Job& job, Compiled result) {
    {
      const std::lock_guard lock(mutex);
      if (std::exchange(job.has_result, true)) return;
    }
    job.done(std::move(result));
  }

  void work() {
    lower_priority();
    std::unique_lock lock(mutex);
    while (true) {
      work_arrived.wait(lock, [&] { return stopping || !queue.empty(); });
      if (stopping) return;
      const std::shared_ptr<Job> job = std::move(queue.front());
      queue.pop_front();
      if (job->has_result) continue;
      lock.unlock();
      Compiled result = compile_or_fail(*job);
      // The thread that watches deadlines may notice later than this one: both say the same.
      if (Clock::now() >= job->deadline) result = too_late();
      finish(*job, std::move(result));
      lock.lock();
    }
  }

  Compiled compile_or_fail(const Job& job) {
    try {
      return compile_now(job);
    } catch (const std::bad_alloc&) {
      return tl::unexpected(out_of_memory());
    }
  }

  Compiled compile_now(const Job& job) {
    if (auto known = cache.find(job.key)) return known;
    FATHOM_TRY(const xgrammar::Grammar grammar, convert(job.spec, markup));
    try {
      // Compiling without a vocabulary creates the states only, so their number can be checked
      // first.
      xgrammar::GrammarCompiler states(xgrammar::TokenizerInfo(std::vector<std::string>()), 1,
                                       /*cache_enabled=*/false);
      const auto bytes = static_cast<int64_t>(states.CompileGrammar(grammar).MemorySizeBytes());
      if (bytes > kMaxStateBytes) {
        return invalid("the grammar is too large: its states have {} bytes, at most {} are allowed",
                       bytes, kMaxStateBytes);
      }
      // XGrammar's own caches are off: they would duplicate this one.
      xgrammar::GrammarCompiler compiler(tokens, mask_threads, /*cache_enabled=*/false);
      auto compiled = make_compiled_grammar(compiler.CompileGrammar(grammar));
      cache.insert(job.key, compiled);
      return compiled;
    } catch (const std::bad_alloc&) {
      throw;  // not an error of the grammar
    } catch (const std::exception& problem) {
      return invalid("the grammar cannot be compiled: {}", problem.what());
    }
  }

  // All timeouts are equal, so calls expire in the order of arrival.
  void watch_deadlines() {
    std::unique_lock lock(mutex);
    while (!stopping) {
      if (unfinished.empty()) {
        deadline_arrived.wait(lock);
        continue;
      }
      const std::shared_ptr<Job> job = unfinished.front();
      if (!job->has_result && Clock::now() < job->deadline) {
        deadline_arrived.wait_until(lock, job->deadline);
        continue;
      }
      unfinished.pop_front();
      if (std::exchange(job->has_result, true)) continue;
      lock.unlock();
      job->done(too_late());
      lock.lock();
    }
  }

  Compiled too_late() const {
    try {
      return invalid("the grammar took longer than {} s to compile",
                     std::chrono::duration<double>(options.deadline).count());
    } catch (const std::bad_alloc&) {
      return tl::unexpected(out_of_memory());
    }
  }

  const GrammarCompilerOptions options;
  const int mask_threads;
  const MarkupTokens markup;
  const xgrammar::TokenizerInfo tokens;
  GrammarCache cache;

  std::mutex mutex;  // guards the members below
  std::condition_variable work_arrived, deadline_arrived;
  std::deque<std::shared_ptr<Job>> queue;       // not started
  std::deque<std::shared_ptr<Job>> unfinished;  // ordered by deadline; some may have a result
  bool stopping = false;
  std::vector<std::thread> threads;
};

GrammarCompiler::GrammarCompiler(const std::shared_ptr<const Tokenizer>& tokenizer,
                                 int64_t vocab_size, GrammarCompilerOptions options)
    : parts_(std::make_unique<Parts>(tokenizer, vocab_size, options)) {}

GrammarCompiler::~GrammarCompiler() = default;

void GrammarCompiler::compile(GrammarSpec spec, Done done) {
  if (is_oversized(spec)) {
    // convert() gives the exact error without reading all of the text.
    const auto refused = convert(spec, MarkupTokens());
    return done(tl::unexpected<Status>(refused.error()));
  }
  auto job = std::make_shared<Job>();
  job->key = key_of(spec);
  if (auto known = parts_->cache.find(job->key)) return done(std::move(known));
  job->spec = std::move(spec);
  job->done = std::move(done);
  job->deadline = Clock::now() + parts_->options.deadline;
  {
    std::unique_lock lock(parts_->mutex);
    auto& waiting = parts_->unfinished;
    std::erase_if(waiting, [](const auto& other) { return other->has_result; });
    if (std::ssize(waiting) >= parts_->options.max_waiting) {
      const auto count = waiting.size();
      lock.unlock();
      return job->done(error(Code::kResourceExhausted,
                             "{} grammars wait to be compiled, at most {} may", count,
                             parts_->options.max_waiting));
    }
    waiting.push_back(job);
    try {
      parts_->queue.push_back(job);
    } catch (const std::bad_alloc&) {
      waiting.pop_back();
      throw;
    }
  }
  parts_->work_arrived.notify_one();
  parts_->deadline_arrived.notify_one();
}

Compiled GrammarCompiler::compile(GrammarSpec spec) {
  // Shared, because `done` may still be running when the caller has its result.
  const auto promise = std::make_shared<std::promise<Compiled>>();
  auto result = promise->get_future();
  compile(std::move(spec),
          [promise](Compiled compiled) { promise->set_value(std::move(compiled)); });
  return result.get();
}

int64_t GrammarCompiler::cache_bytes() const { return parts_->cache.bytes(); }

}  // namespace fathom
