#include "kv_events/event_log.h"

#include <new>
#include <span>
#include <utility>

#include "base/entropy.h"
#include "base/random.h"
#include "kv_events/msgpack_writer.h"

namespace fathom {

EventLog::EventLog(int lane, int64_t block_tokens, size_t max_events)
    : lane_(lane),
      block_tokens_(block_tokens),
      max_events_(max_events),
      seed_(unpredictable_bits()) {}

uint64_t EventLog::hash_of(const PageKey& key) const {
  return mix64(key.low ^ mix64(key.high ^ seed_));
}

void EventLog::stored(const PageKey& key, const PageKey* parent,
                      std::span<const int32_t> tokens) noexcept {
  try {
    Event event{
        .kind = Kind::kStored, .hash = hash_of(key), .tokens = {tokens.begin(), tokens.end()}};
    if (parent != nullptr) event.parent = hash_of(*parent);
    add(std::move(event));
  } catch (const std::bad_alloc&) {
    drop_all();
  }
}

void EventLog::removed(const PageKey& key) noexcept {
  try {
    add({.kind = Kind::kRemoved, .hash = hash_of(key)});
  } catch (const std::bad_alloc&) {
    drop_all();
  }
}

void EventLog::cleared() noexcept {
  try {
    add({.kind = Kind::kCleared});
  } catch (const std::bad_alloc&) {
    drop_all();
  }
}

void EventLog::add(Event event) {
  const std::lock_guard lock(mutex_);
  if (events_.size() >= max_events_) {
    events_.clear();
    has_lost_ = true;
  }
  events_.push_back(std::move(event));
}

void EventLog::drop_all() noexcept {
  const std::lock_guard lock(mutex_);
  events_.clear();
  has_lost_ = true;
}

std::optional<std::string> EventLog::take(double time) {
  std::vector<Event> events;
  bool has_lost = false;
  {
    const std::lock_guard lock(mutex_);
    events.swap(events_);
    has_lost = std::exchange(has_lost_, false);
  }
  if (events.empty() && !has_lost) return std::nullopt;
  // Blocks that follow one another in a text, and removals, are one event.
  std::vector<std::span<const Event>> groups;
  for (size_t begin = 0, end = 0; begin < events.size(); begin = end) {
    const Event& first = events[begin];
    for (end = begin + 1; end < events.size() && events[end].kind == first.kind; ++end) {
      if (first.kind == Kind::kStored && events[end].parent != events[end - 1].hash) break;
      if (first.kind == Kind::kCleared) break;
    }
    groups.push_back(std::span(events).subspan(begin, end - begin));
  }
  std::string out;
  MsgpackWriter writer(out);
  writer.array(3);
  writer.real(time);
  writer.array(groups.size() + (has_lost ? 1 : 0));
  if (has_lost) {
    writer.array(1);
    writer.text("AllBlocksCleared");
  }
  for (const std::span<const Event> group : groups) {
    const Event& first = group.front();
    if (first.kind == Kind::kCleared) {
      writer.array(1);
      writer.text("AllBlocksCleared");
      continue;
    }
    const bool is_stored = first.kind == Kind::kStored;
    writer.array(is_stored ? 7 : 3);
    writer.text(is_stored ? "BlockStored" : "BlockRemoved");
    writer.array(group.size());
    for (const Event& event : group) writer.integer(event.hash);
    if (is_stored) {
      first.parent ? writer.integer(*first.parent) : writer.nil();
      writer.array(group.size() * static_cast<size_t>(block_tokens_));
      for (const Event& event : group) {
        for (const int32_t token : event.tokens) writer.integer(static_cast<uint64_t>(token));
      }
      writer.integer(static_cast<uint64_t>(block_tokens_));
      writer.nil();
    }
    writer.text("GPU");
  }
  writer.integer(static_cast<uint64_t>(lane_));
  return out;
}

}  // namespace fathom
