// Publishes cache events over ZeroMQ as vLLM does, for routers that keep a picture of the cache.
//
// A PUB socket sends messages of three parts: topic, sequence number (8 bytes, the most significant
// first, from 0), batch (event_log.h). A ROUTER socket answers a request of an empty part and a
// sequence number with the batches from there on that are still kept, each as an empty part, its
// number and the batch, and ends with the number -1 and an empty batch.
//
// Owns its thread, which looks for events every kEventPeriod. One numbering for all lanes.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "kv_events/event_log.h"

namespace fathom {

inline constexpr std::chrono::milliseconds kEventPeriod{10};
inline constexpr size_t kKeptBatches = 10'000;  // for replays, as vLLM keeps

struct EventPublisherOptions {
  std::string endpoint = {};         // ZeroMQ's form, bound: tcp://*:5557, ipc:///run/events
  std::string replay_endpoint = {};  // empty: no replays
  std::string topic = {};
};

class EventPublisher {
 public:
  // kInvalidArgument: an endpoint cannot be bound, or the program was built without ZeroMQ.
  static Result<std::unique_ptr<EventPublisher>> create(
      const EventPublisherOptions& options, const std::vector<std::shared_ptr<EventLog>>& logs);
  ~EventPublisher();
  EventPublisher(const EventPublisher&) = delete;
  EventPublisher& operator=(const EventPublisher&) = delete;

 private:
  struct Parts;
  explicit EventPublisher(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace fathom
