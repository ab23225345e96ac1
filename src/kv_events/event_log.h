// What one lane's prefix cache got and lost since somebody asked last, as batches of vLLM's cache
// events.
//
// A batch is MessagePack: [time, [event, …], lane]; an event is one of
//   ["BlockStored", [hash, …], hash before or nil, [token, …], tokens a block, nil, "GPU"]
//   ["BlockRemoved", [hash, …], "GPU"]
//   ["AllBlocksCleared"]
// A block is a page. Its hash is 64 bits that stand for its text from the first token on, in this
// process only. "GPU" is what readers expect for the first place of rows, on any device.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cache/cache_observer.h"

namespace fathom {

// The observer's methods are for the engine's thread, take() is for any.
class EventLog : public CacheObserver {
 public:
  // Keeps at most so many events. When more wait all are dropped, and what is told instead is that
  // nothing is cached: a reader may miss pages, but expects none that are not there.
  EventLog(int lane, int64_t block_tokens, size_t max_events = 65'536);

  void stored(const PageKey& key, const PageKey* parent,
              std::span<const int32_t> tokens) noexcept override;
  void removed(const PageKey& key) noexcept override;
  void cleared() noexcept override;

  // A batch of all that has happened, at `time` (seconds since 1970); none: nothing has.
  std::optional<std::string> take(double time);

 private:
  enum class Kind : uint8_t { kStored, kRemoved, kCleared };
  struct Event {
    Kind kind{};
    uint64_t hash = 0;
    std::optional<uint64_t> parent = {};
    std::vector<int32_t> tokens = {};
  };
  void add(Event event);
  void drop_all() noexcept;
  uint64_t hash_of(const PageKey& key) const;

  const int lane_;
  const int64_t block_tokens_;
  const size_t max_events_;
  const uint64_t seed_;  // of hashes: keys stay in this process
  std::mutex mutex_;
  std::vector<Event> events_;
  bool has_lost_ = false;
};

}  // namespace fathom
