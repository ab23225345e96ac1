// Every fault point that tests can set: FATHOM_FAULT=NAME:NUMBER[,NAME:NUMBER…].
//
// * step_ms:N: a step takes at least N ms, so that requests last longer than what is done to them
// * step_gate:FD: steps begin only as far as the file behind this descriptor allows (StepGate), so
//   that a test and not the machine's speed says how far a request has come
// * step_hang:N: the N-th step never ends
// * step_error:N: every N-th step fails, as a device may
// * device_lost:N: from the N-th step on every step fails, as on a device whose context is corrupt
// * step_memory:N: every N-th step finds no memory, which the runner reports as an error
// * preempt:N: every N-th step preempts a sequence
// * meeting_throw:N, meeting_stop:N, meeting_kill:N: at its N-th collective a rank of this process
//   throws, or the process stops or kills itself
// * meeting_kind:K: counts collectives of one kind only, 1 + its number in comm/collective.h
// * meeting_phase:P: 1 before (the default), 2 in, 3 after the collective
// * meeting_delay:N: ranks sleep up to N us before every eighth collective, at random, and the
//   longest wait in a collective is said at the end
// * alloc_fail:FD: allocations fail as the file behind this descriptor says (allocation_faults.h)
#include "cli/engine_faults.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "allocation_faults.h"

namespace fathom {

// Exported, so that it has a name where stacks are shown.
[[gnu::noinline]] void hang_in_a_step() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

namespace {

using Faults = std::map<std::string, int64_t>;

// Shared with the test that wrote FATHOM_FAULT=step_gate:FD; both count steps from the start.
struct StepGate {
  int64_t allowed;  // steps that may begin; the test raises it
  int64_t reached;  // steps that have come to the gate; the engine's thread writes it
};

// A misspelt fault would be a test that tests nothing.
[[noreturn]] void refuse(const std::string& text) {
  std::fprintf(stderr, "FATHOM_FAULT: what is '%s'?\n", text.c_str());
  std::_Exit(2);
}

Faults read_faults() {
  Faults faults = {{"step_ms", 0},       {"step_gate", 0},    {"step_hang", 0},
                   {"step_error", 0},    {"device_lost", 0},  {"step_memory", 0},
                   {"preempt", 0},       {"alloc_fail", 0},   {"meeting_throw", 0},
                   {"meeting_stop", 0},  {"meeting_kill", 0}, {"meeting_kind", 0},
                   {"meeting_phase", 1}, {"meeting_delay", 0}};
  const char* const given = std::getenv("FATHOM_FAULT");
  std::string text = given == nullptr ? "" : given;
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    const std::string one = text.substr(0, comma);
    text.erase(0, comma + 1);
    const size_t colon = one.find(':');
    if (colon == std::string::npos || !faults.contains(one.substr(0, colon))) refuse(one);
    char* end = nullptr;
    const int64_t number = std::strtoll(one.c_str() + colon + 1, &end, 10);
    if (*end != '\0' || number <= 0) refuse(one);
    faults[one.substr(0, colon)] = number;
  }
  return faults;
}

// Maps the gate behind a descriptor; null without a descriptor.
StepGate* map_gate(int64_t descriptor) {
  if (descriptor == 0) return nullptr;
  void* const mapped = mmap(nullptr, sizeof(StepGate), PROT_READ | PROT_WRITE, MAP_SHARED,
                            static_cast<int>(descriptor), 0);
  if (mapped == MAP_FAILED) refuse("step_gate");
  return static_cast<StepGate*>(mapped);
}

class FaultyRunner : public Runner {
 public:
  FaultyRunner(std::unique_ptr<Runner> runner, Faults faults)
      : runner_(std::move(runner)),
        gate_(map_gate(faults["step_gate"])),
        faults_(std::move(faults)) {}

  int64_t vocab_size() const override { return runner_->vocab_size(); }
  int64_t max_model_len() const override { return runner_->max_model_len(); }
  int64_t num_pages() const override { return runner_->num_pages(); }
  int num_lanes() const override { return runner_->num_lanes(); }
  PageTransfer* page_transfer(int lane) override { return runner_->page_transfer(lane); }
  bool can_copy_pages(int from_lane, int to_lane) const override {
    return runner_->can_copy_pages(from_lane, to_lane);
  }
  void copy_page(int from_lane, int32_t from, int to_lane, int32_t to) override {
    runner_->copy_page(from_lane, from, to_lane, to);
  }
  std::optional<ExpertStats> expert_stats() const override { return runner_->expert_stats(); }
  int64_t keys_worth_a_row() const override { return runner_->keys_worth_a_row(); }
  bool answers_equal_prompts() const override { return runner_->answers_equal_prompts(); }
  const Stream* host_stream() const override { return runner_->host_stream(); }
  int max_steps_in_flight() const override { return runner_->max_steps_in_flight(); }

  Result<> begin(std::span<const ForwardBatch> lanes, std::span<const SampleRow> rows) override {
    ++steps_;
    if (gate_ != nullptr) pass_gate();
    std::this_thread::sleep_for(std::chrono::milliseconds(faults_["step_ms"]));
    if (steps_ == faults_["step_hang"]) hang_in_a_step();
    if (device_is_lost()) return error(Code::kInternal, "the device is gone (a fault)");
    if (is_turn("step_error")) return error(Code::kInternal, "the device failed (a fault)");
    if (is_turn("step_memory")) return error(Code::kResourceExhausted, "no memory (a fault)");
    return runner_->begin(lanes, rows);
  }

  Result<std::span<const SampledToken>> finish() override { return runner_->finish(); }
  bool is_lost() override { return runner_->is_lost() || device_is_lost(); }
  Status loss() const override { return runner_->loss(); }
  void watch_loss(std::function<void()> wake) override { runner_->watch_loss(std::move(wake)); }

 private:
  void pass_gate() {
    std::atomic_ref<int64_t>(gate_->reached).store(steps_);
    while (std::atomic_ref<int64_t>(gate_->allowed).load() < steps_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  bool device_is_lost() { return faults_["device_lost"] > 0 && steps_ >= faults_["device_lost"]; }

  bool is_turn(const std::string& fault) {
    return faults_[fault] > 0 && steps_ % faults_[fault] == 0;
  }

  std::unique_ptr<Runner> runner_;
  StepGate* gate_;
  Faults faults_;
  int64_t steps_ = 0;
};

// The longest wait of any rank here in a collective.
class LongestWait {
 public:
  void note(std::chrono::nanoseconds wait) {
    int64_t before = longest_.load();
    while (before < wait.count() && !longest_.compare_exchange_weak(before, wait.count())) {
    }
  }
  void print() const {
    std::fprintf(stderr, "longest wait in a collective: %.3f s\n",
                 static_cast<double>(longest_.load()) / 1e9);
  }

 private:
  std::atomic<int64_t> longest_{0};  // ns
};
LongestWait longest_wait;

void delay_meeting(int64_t longest_us, const MeetingPoint& at) {
  using Clock = std::chrono::steady_clock;
  thread_local std::minstd_rand random(static_cast<uint32_t>(at.rank + 1));
  thread_local Clock::time_point came;
  if (at.phase == MeetingPhase::kBefore) {
    if (random() % 8 == 0) {
      std::this_thread::sleep_for(
          std::chrono::microseconds(static_cast<int64_t>(random()) % longest_us));
    }
    came = Clock::now();
  } else if (at.phase == MeetingPhase::kAfter) {
    longest_wait.note(Clock::now() - came);
  }
}

}  // namespace

std::unique_ptr<Runner> with_engine_faults(std::unique_ptr<Runner> runner, EngineOptions* options) {
  Faults faults = read_faults();
  options->preempt_every = faults["preempt"];
  const auto descriptor = static_cast<int>(faults["alloc_fail"]);
  if (descriptor > 0 && !control_allocations_by(descriptor)) refuse("alloc_fail");
  return std::make_unique<FaultyRunner>(std::move(runner), std::move(faults));
}

MeetingHook meeting_fault() {
  const Faults faults = read_faults();
  if (faults.at("meeting_delay") > 0) {
    std::atexit([] { longest_wait.print(); });
    return [longest_us = faults.at("meeting_delay")](const MeetingPoint& at) {
      delay_meeting(longest_us, at);
    };
  }
  const int64_t turn =
      faults.at("meeting_throw") + faults.at("meeting_stop") + faults.at("meeting_kill");
  if (turn == 0) return nullptr;
  return [faults, turn](const MeetingPoint& at) {
    // Meetings of this rank, in all of its groups.
    thread_local int64_t meetings = 0;
    const int64_t kind = faults.at("meeting_kind");
    if (static_cast<int64_t>(at.phase) + 1 != faults.at("meeting_phase")) return;
    if (kind != 0 && kind != static_cast<int64_t>(at.kind) + 1) return;
    if (++meetings != turn) return;
    if (faults.at("meeting_stop") > 0) raise(SIGSTOP);
    if (faults.at("meeting_kill") > 0) raise(SIGKILL);
    if (faults.at("meeting_throw") > 0) {
      throw std::runtime_error("a fault at meeting " + std::to_string(turn));
    }
  };
}

}  // namespace fathom
