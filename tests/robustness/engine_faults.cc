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
// * alloc_fail:FD: allocations fail as the file behind this descriptor says (allocation_faults.h)
#include "cli/engine_faults.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
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
  Faults faults = {{"step_ms", 0},     {"step_gate", 0},   {"step_hang", 0}, {"step_error", 0},
                   {"device_lost", 0}, {"step_memory", 0}, {"preempt", 0},   {"alloc_fail", 0}};
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
  const Stream* host_stream() const override { return runner_->host_stream(); }
  int max_steps_in_flight() const override { return runner_->max_steps_in_flight(); }

  Result<> begin(std::span<const ForwardBatch> lanes, std::span<const SampleRow> rows) override {
    ++steps_;
    if (gate_ != nullptr) pass_gate();
    std::this_thread::sleep_for(std::chrono::milliseconds(faults_["step_ms"]));
    if (steps_ == faults_["step_hang"]) hang_in_a_step();
    if (is_lost()) return error(Code::kInternal, "the device is gone (a fault)");
    if (is_turn("step_error")) return error(Code::kInternal, "the device failed (a fault)");
    if (is_turn("step_memory")) return error(Code::kResourceExhausted, "no memory (a fault)");
    return runner_->begin(lanes, rows);
  }

  Result<std::span<const SampledToken>> finish() override { return runner_->finish(); }
  bool is_lost() override { return faults_["device_lost"] > 0 && steps_ >= faults_["device_lost"]; }

 private:
  void pass_gate() {
    std::atomic_ref<int64_t>(gate_->reached).store(steps_);
    while (std::atomic_ref<int64_t>(gate_->allowed).load() < steps_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  bool is_turn(const std::string& fault) {
    return faults_[fault] > 0 && steps_ % faults_[fault] == 0;
  }

  std::unique_ptr<Runner> runner_;
  StepGate* gate_;
  Faults faults_;
  int64_t steps_ = 0;
};

}  // namespace

std::unique_ptr<Runner> with_engine_faults(std::unique_ptr<Runner> runner, EngineOptions* options) {
  Faults faults = read_faults();
  options->preempt_every = faults["preempt"];
  const auto descriptor = static_cast<int>(faults["alloc_fail"]);
  if (descriptor > 0 && !control_allocations_by(descriptor)) refuse("alloc_fail");
  return std::make_unique<FaultyRunner>(std::move(runner), std::move(faults));
}

}  // namespace fathom
