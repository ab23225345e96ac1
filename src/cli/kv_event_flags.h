// The flags of `fathom serve` with which routers are told what its cache has: --kv-events-endpoint.
#pragma once

#include <memory>
#include <vector>

#include "base/status.h"
#include "cli/flags.h"
#include "cli/loaded_engine.h"
#include "kv_events/event_publisher.h"

namespace fathom {

void add_kv_event_flags(CLI::App& command, EventPublisherOptions* options);

// Publishes what the caches of all lanes get and lose, and has the engine say it. Null: the flags
// do not ask for it.
Result<std::unique_ptr<EventPublisher>> publish_cache_events(const EventPublisherOptions& options,
                                                             const ModelFlags& model,
                                                             EngineNeeds& needs);

}  // namespace fathom
