#include "kv_events/event_publisher.h"

#include <zmq.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <deque>
#include <new>
#include <thread>
#include <utility>

#include "base/log.h"

namespace fathom {
namespace {

// Messages that wait for one slow reader; more are lost to it, as its sequence numbers show.
constexpr int kHighWaterMark = 100'000;
constexpr uint64_t kEndOfReplay = ~uint64_t{0};

struct CloseContext {
  void operator()(void* context) const { zmq_ctx_term(context); }
};
struct CloseSocket {
  void operator()(void* socket) const { zmq_close(socket); }
};
using Socket = std::unique_ptr<void, CloseSocket>;

Result<Socket> bound_socket(void* context, int type, const std::string& endpoint) {
  Socket socket(zmq_socket(context, type));
  const int no_linger = 0;
  if (socket) {
    zmq_setsockopt(socket.get(), ZMQ_LINGER, &no_linger, sizeof no_linger);
    zmq_setsockopt(socket.get(), ZMQ_SNDHWM, &kHighWaterMark, sizeof kHighWaterMark);
  }
  if (!socket || zmq_bind(socket.get(), endpoint.c_str()) != 0) {
    return invalid("{} cannot be bound: {}", endpoint, zmq_strerror(zmq_errno()));
  }
  return socket;
}

std::array<char, 8> big_endian(uint64_t number) {
  std::array<char, 8> bytes{};
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<char>(number >> (8 * (bytes.size() - 1 - i)));
  }
  return bytes;
}

bool send(const Socket& socket, std::string_view part, int flags) {
  return zmq_send(socket.get(), part.data(), part.size(), flags | ZMQ_DONTWAIT) >= 0;
}

// The parts of a message; none: there is none.
std::vector<std::string> receive(const Socket& socket) {
  std::vector<std::string> parts;
  bool has_more = true;
  while (has_more) {
    zmq_msg_t part;
    zmq_msg_init(&part);
    if (zmq_msg_recv(&part, socket.get(), ZMQ_DONTWAIT) >= 0) {
      parts.emplace_back(static_cast<const char*>(zmq_msg_data(&part)), zmq_msg_size(&part));
      has_more = zmq_msg_more(&part) != 0;
    } else {
      has_more = false;
    }
    zmq_msg_close(&part);
  }
  return parts;
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

struct EventPublisher::Parts {
  void work() {
    while (!stopping) {
      if (replay) {
        zmq_pollitem_t item{.socket = replay.get(), .fd = 0, .events = ZMQ_POLLIN, .revents = 0};
        zmq_poll(&item, 1, kEventPeriod.count());
      } else {
        std::this_thread::sleep_for(kEventPeriod);
      }
      try {
        publish();
        answer_replay();
      } catch (const std::bad_alloc&) {
        log_warning("cache events are lost: out of memory");
      }
    }
  }

  void publish() {
    for (const auto& log : logs) {
      auto batch = log->take(seconds_since_1970());
      if (!batch) continue;
      const auto number = big_endian(next++);
      send(events, topic, ZMQ_SNDMORE);
      send(events, {number.data(), number.size()}, ZMQ_SNDMORE);
      send(events, *batch, 0);
      kept.push_back(std::move(*batch));
      if (kept.size() > kKeptBatches) kept.pop_front();
    }
  }

  // One request a turn, so that events go on.
  void answer_replay() {
    if (!replay) return;
    const std::vector<std::string> request = receive(replay);
    if (request.size() != 3 || !request[1].empty() || request[2].size() != 8) return;
    uint64_t from = 0;
    for (const char byte : request[2]) from = from << 8 | static_cast<uint8_t>(byte);
    const auto reply = [&](uint64_t number, std::string_view batch) {
      const auto bytes = big_endian(number);
      return send(replay, request[0], ZMQ_SNDMORE) && send(replay, "", ZMQ_SNDMORE) &&
             send(replay, {bytes.data(), bytes.size()}, ZMQ_SNDMORE) && send(replay, batch, 0);
    };
    const uint64_t first = next - kept.size();
    for (uint64_t number = std::max(first, from); number < next; ++number) {
      if (!reply(number, kept[number - first])) return;  // its reader has gone, or is too slow
    }
    reply(kEndOfReplay, "");
  }

  std::unique_ptr<void, CloseContext> context;  // before its sockets: it waits for their end
  Socket events, replay;
  std::string topic;
  std::vector<std::shared_ptr<EventLog>> logs;
  uint64_t next = 0;
  std::deque<std::string> kept;  // the batches before `next`
  std::atomic<bool> stopping{false};
  std::thread thread;
};

EventPublisher::EventPublisher(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

Result<std::unique_ptr<EventPublisher>> EventPublisher::create(
    const EventPublisherOptions& options, const std::vector<std::shared_ptr<EventLog>>& logs) {
  auto parts = std::make_unique<Parts>();
  parts->context.reset(zmq_ctx_new());
  FATHOM_TRY(parts->events, bound_socket(parts->context.get(), ZMQ_PUB, options.endpoint));
  if (!options.replay_endpoint.empty()) {
    FATHOM_TRY(parts->replay,
               bound_socket(parts->context.get(), ZMQ_ROUTER, options.replay_endpoint));
  }
  parts->topic = options.topic;
  parts->logs = logs;
  parts->thread = std::thread([work = parts.get()] { work->work(); });
  return std::unique_ptr<EventPublisher>(new EventPublisher(std::move(parts)));
}

EventPublisher::~EventPublisher() {
  parts_->stopping = true;
  parts_->thread.join();
}

}  // namespace fathom
