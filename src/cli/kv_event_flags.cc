#include "cli/kv_event_flags.h"

#include <CLI/CLI.hpp>

#include "base/log.h"
#include "cache/latent_layout.h"

namespace fathom {

void add_kv_event_flags(CLI::App& command, EventPublisherOptions* options) {
  FlagGroup group(command, "Cache events");
  group.text(
      "--kv-events-endpoint", &options->endpoint, "ENDPOINT",
      "ZeroMQ endpoint where the prefix cache's pages are told in vLLM's format, for example "
      "tcp://127.0.0.1:5557; whoever reads it reads prompts");
  group.text("--kv-events-replay-endpoint", &options->replay_endpoint, "ENDPOINT",
             "ZeroMQ endpoint where the newest 10,000 batches can be asked for again");
  group.text("--kv-events-topic", &options->topic, "TOPIC", "Topic of the messages");
}

Result<std::unique_ptr<EventPublisher>> publish_cache_events(const EventPublisherOptions& options,
                                                             const ModelFlags& model,
                                                             EngineNeeds& needs) {
  if (options.endpoint.empty()) {
    if (!options.replay_endpoint.empty() || !options.topic.empty()) {
      return invalid("{} needs --kv-events-endpoint",
                     options.topic.empty() ? "--kv-events-replay-endpoint" : "--kv-events-topic");
    }
    return nullptr;
  }
  if (!model.prefix_caching.value_or(true)) {
    return invalid("--kv-events-endpoint is {} without a prefix cache, whose pages it tells",
                   options.endpoint);
  }
  std::vector<std::shared_ptr<EventLog>> logs;
  for (int lane = 0; lane < model.placement().dp; ++lane) {
    logs.push_back(std::make_shared<EventLog>(lane, kPageSize));
    needs.cache_observers.push_back(logs.back());
  }
  auto publisher = EventPublisher::create(options, logs);
  if (!publisher) return with_context("cache events: ", publisher.error());
  log_info("the cache's pages are told at {}", options.endpoint);
  return publisher;
}

}  // namespace fathom
