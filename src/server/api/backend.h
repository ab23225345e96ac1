// The loaded model that a server serves.
#pragma once

#include <memory>

#include "base/json.h"
#include "engine/engine.h"
#include "grammar/grammar_compiler.h"
#include "server/api/metrics.h"
#include "server/openai/served_model.h"

namespace fathom {

// Filled by the code that loads the model, then read-only. The engine's events end before it is
// destroyed.
struct Backend {
  ServedModel served;
  CacheConfig cache;
  json::object settings;  // for /server_info: the start-up settings
  std::unique_ptr<GrammarCompiler> grammars;
  std::unique_ptr<Engine> engine;
};

}  // namespace fathom
