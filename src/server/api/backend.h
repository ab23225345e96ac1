// The loaded model that a server serves.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

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
  // Appends metrics of parts that the API does not know; null: there are none. Any thread.
  std::function<void(std::string_view labels, const EngineStats& engine, std::string& out)>
      more_metrics = {};
  std::unique_ptr<GrammarCompiler> grammars;
  std::unique_ptr<Engine> engine;
};

}  // namespace fathom
