// Random loads on the engine over the fake model, compared with the serial oracle. Test code only.
#pragma once

#include <random>

#include "engine/engine.h"
#include "engine/fake_runner.h"
#include "engine/serial_oracle.h"

namespace fathom {

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
};

// Of every sampling option. The speculation is part of it where the load has drafts.
Request random_request(std::mt19937& random, const Load& load);

// Runs the load and expects each choice's output to be the oracle's, and no page to be lost.
EngineStats run_once(Load load);

}  // namespace fathom
