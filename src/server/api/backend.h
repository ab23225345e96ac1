// What a server serves, once the model is there.
#pragma once

#include <memory>

#include "base/json.h"
#include "engine/engine.h"
#include "grammar/grammar_compiler.h"
#include "server/api/metrics.h"
#include "server/openai/served_model.h"

namespace fathom {

// Filled by whoever loads the model and then only read. The engine's events end before it goes.
struct Backend {
  ServedModel served;
  CacheConfig cache;
  json::object settings;  // for /server_info: what the server was started with
  std::unique_ptr<GrammarCompiler> grammars;
  std::unique_ptr<Engine> engine;
};

}  // namespace fathom
