// A build without ZeroMQ.
#include "kv_events/event_publisher.h"

namespace fathom {

struct EventPublisher::Parts {};

EventPublisher::EventPublisher(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

EventPublisher::~EventPublisher() = default;

Result<std::unique_ptr<EventPublisher>> EventPublisher::create(
    const EventPublisherOptions&, const std::vector<std::shared_ptr<EventLog>>&) {
  return invalid("this program was built without ZeroMQ: build where libzmq3-dev is installed");
}

}  // namespace fathom
