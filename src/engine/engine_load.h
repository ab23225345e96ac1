// Random loads on the engine over the fake model, compared with the serial oracle. Test code only.
#pragma once

#include <optional>
#include <random>

#include "engine/engine.h"
#include "engine/fake_runner.h"
#include "engine/serial_oracle.h"

namespace fathom {

// Messages between two engines that go wrong: the share of each kind of fault.
struct LossyMessages {
  double share = 0;  // dropped, delayed, duplicated, reordered, truncated, altered
  uint32_t seed = 1;
};

// The load's prompts are computed by a second engine.
struct Separation {
  int64_t num_pages = 64;  // of each of its lanes
  int num_lanes = 1;
  int steps_in_flight = 1;
  EngineOptions options = {};
  FakeCopies copies = {};
  LossyMessages messages = {};
  int64_t mailbox_bytes = int64_t{1} << 20;
  int64_t fail_steps_every = 0;  // of its steps; 0: none
  // Both are sites of one engine (Engine::create_separated), with the load's options.
  bool one_process = false;
  bool with_digests = false;               // with it
  RoleLimits roles = {};                   // with it
  std::chrono::microseconds step_time{0};  // each of its steps takes longer by this
};

struct Load {
  FakeModel model;
  EngineOptions options;
  int num_requests = 60;
  int max_prompt = 200, max_output = 80;
  double abort_share = 0;
  double shared_share = 0.5;  // of prompts that share a prefix with others
  int steps_in_flight = 1;
  // All requests wait before the second step: what is counted then depends on the load alone, not
  // on how arrivals and steps fall together.
  bool arrives_at_once = false;
  FakeCopies copies = {};
  FakeDrafts drafts = {};
  uint32_t seed = 1;
  // options.prefill's limits are kept, its link is made.
  std::optional<Separation> separation = {};
  // Whether choices may end with kUnavailable, with the beginning of the right answer.
  bool may_fail = false;
};

// Draws each sampling option at random. With drafts in the load, speculation is drawn too.
Request random_request(std::mt19937& random, const Load& load);

// Runs the load and expects each choice's output to be the oracle's, and no page to be lost.
EngineStats run_once(Load load);

}  // namespace fathom
