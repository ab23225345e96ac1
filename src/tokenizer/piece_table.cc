#include "tokenizer/piece_table.h"

#define XXH_INLINE_ALL  // header-only: nothing to link
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace fathom {
namespace {

constexpr size_t kShort = 16;

template <typename T>
uint64_t load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

}  // namespace

// Twice the size: half of the slots stay empty.
PieceTable::PieceTable(size_t count)
    : mask_(std::bit_ceil(std::max<size_t>(count * 2, 16)) - 1),
      slots_(mask_ + 1),
      long_bytes_(mask_ + 1) {}

// Up to 16 bytes fit into two overlapping loads from both ends, which together with the length
// identify the bytes. Does not read out of bounds.
PieceTable::Key PieceTable::key_of(std::string_view bytes) const {
  const size_t n = bytes.size();
  const char* p = bytes.data();
  Key key{};
  if (n > kShort) {
    const XXH128_hash_t hash = XXH3_128bits_withSeed(p, n, hash_.seed());
    return {hash.low64, hash.high64, hash.low64};
  }
  if (n >= 8) {
    key.low = load<uint64_t>(p);
    key.high = load<uint64_t>(p + n - 8);
  } else if (n >= 4) {
    key.low = load<uint32_t>(p) | load<uint32_t>(p + n - 4) << 32;
  } else if (n > 0) {
    key.low = load<uint8_t>(p) | load<uint8_t>(p + n / 2) << 8 | load<uint8_t>(p + n - 1) << 16;
  }
  key.hash = hash_(key.low, key.high ^ n << 56);
  return key;
}

const PieceTable::Entry* PieceTable::find(std::string_view bytes) const {
  const Key key = key_of(bytes);
  for (size_t i = key.hash & mask_;; i = (i + 1) & mask_) {
    const Entry& entry = slots_[i];
    if (entry.id < 0) return nullptr;
    if (entry.low != key.low || entry.high != key.high || entry.length != bytes.size()) continue;
    if (bytes.size() <= kShort || long_bytes_[i] == bytes) return &entry;
  }
}

bool PieceTable::insert(std::string_view bytes, int32_t id) {
  const Key key = key_of(bytes);
  size_t i = key.hash & mask_;
  for (; slots_[i].id >= 0; i = (i + 1) & mask_) {
    const Entry& entry = slots_[i];
    const bool same_key =
        entry.low == key.low && entry.high == key.high && entry.length == bytes.size();
    if (same_key && (bytes.size() <= kShort || long_bytes_[i] == bytes)) return false;
  }
  slots_[i].low = key.low;
  slots_[i].high = key.high;
  slots_[i].id = id;
  slots_[i].length = static_cast<uint32_t>(bytes.size());
  if (bytes.size() > kShort) long_bytes_[i] = bytes;
  return true;
}

}  // namespace fathom
