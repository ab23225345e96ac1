#include "tokenizer/bpe.h"

#include <algorithm>
#include <queue>

#include "tokenizer/byte_level.h"

namespace fathom {
namespace {

// For pieces up to this size, scanning all pairs is faster than a heap.
constexpr size_t kShortPiece = 64;

// 0xC0, 0xC1 and 0xF5 to 0xFF never occur in UTF-8.
bool occurs_in_utf8(int byte) { return byte < 0xF5 && byte != 0xC0 && byte != 0xC1; }

}  // namespace

Bpe::Bpe(const std::vector<Entry>& entries) : pieces_(entries.size()) {
  int32_t end_id = 0;
  for (const Entry& entry : entries) end_id = std::max(end_id, entry.id + 1);
  // Two passes, sizes first: entries are in no particular order.
  begin_.assign(static_cast<size_t>(end_id) + 1, 0);
  for (const Entry& entry : entries) {
    begin_[entry.id + 1] = static_cast<uint32_t>(entry.bytes.size());
  }
  for (size_t i = 1; i < begin_.size(); ++i) begin_[i] += begin_[i - 1];
  blob_.resize(begin_.back());
  for (const Entry& entry : entries) {
    std::copy(entry.bytes.begin(), entry.bytes.end(), blob_.begin() + begin_[entry.id]);
  }
}

Result<Bpe> Bpe::build(const std::vector<Entry>& entries, const std::vector<NamedMerge>& merges,
                       bool ignore_merges) {
  Bpe bpe(entries);
  bpe.ignore_merges_ = ignore_merges;
  FATHOM_RETURN_IF_ERROR(bpe.add_entries(entries));
  FATHOM_RETURN_IF_ERROR(bpe.add_merges(merges));
  return bpe;
}

Result<Bpe> Bpe::from_ranks(const std::vector<Entry>& entries) {
  Bpe bpe(entries);
  bpe.ignore_merges_ = true;
  FATHOM_RETURN_IF_ERROR(bpe.add_entries(entries));
  bpe.add_all_splits();
  return bpe;
}

Result<> Bpe::add_entries(const std::vector<Entry>& entries) {
  for (const Entry& entry : entries) {
    if (entry.mergeable) pieces_.insert(bytes_of(entry.id), entry.id);
  }
  for (int byte = 0; byte < 256; ++byte) {
    const char text = static_cast<char>(byte);
    byte_id_[byte] = find({&text, 1});
    if (byte_id_[byte] < 0 && occurs_in_utf8(byte)) {
      return invalid(
          "the vocabulary has no entry for the byte 0x{:02X} (\"{}\"), so that text could be lost",
          byte, glyphs_of_bytes({&text, 1}));
    }
  }
  return {};
}

void Bpe::add_all_splits() {
  struct Split {
    int32_t left, right, both;
  };
  std::vector<Split> splits;
  for (int32_t id = 0; id < end_id(); ++id) {
    const std::string_view bytes = bytes_of(id);
    for (size_t at = 1; at < bytes.size(); ++at) {
      const int32_t left = find(bytes.substr(0, at)), right = find(bytes.substr(at));
      if (left >= 0 && right >= 0) splits.push_back({left, right, id});
    }
  }
  merges_ = MergeTable(splits.size());
  for (const auto& [left, right, both] : splits) {
    merges_.insert(left, right, {static_cast<uint32_t>(both), both});
  }
}

Result<> Bpe::add_merges(const std::vector<NamedMerge>& merges) {
  merges_ = MergeTable(merges.size());
  for (size_t i = 0; i < merges.size(); ++i) {
    const auto& [left, right] = merges[i];
    const std::string both = left + right;
    const std::string_view parts[] = {left, right, both};
    int32_t ids[3];
    for (int part = 0; part < 3; ++part) {
      ids[part] = find(parts[part]);
      if (ids[part] >= 0) continue;
      return invalid("model.merges[{}] (\"{}\" and \"{}\"): \"{}\" is not in model.vocab", i,
                     glyphs_of_bytes(left.substr(0, 40)), glyphs_of_bytes(right.substr(0, 40)),
                     glyphs_of_bytes(parts[part].substr(0, 40)));
    }
    merges_.insert(ids[0], ids[1], {static_cast<uint32_t>(i), ids[2]});
  }
  return {};
}

int32_t Bpe::find(std::string_view bytes) const {
  const PieceTable::Entry* entry = pieces_.find(bytes);
  return entry == nullptr ? -1 : entry->id;
}

std::string_view Bpe::bytes_of(int32_t id) const {
  if (id < 0 || id >= end_id()) return {};
  return std::string_view(blob_).substr(begin_[id], begin_[id + 1] - begin_[id]);
}

void Bpe::encode_piece(std::string_view piece, std::vector<int32_t>& out) const {
  const PieceTable::Entry* entry = pieces_.find(piece);
  if (entry != nullptr && (ignore_merges_ || reaches_itself(*entry, piece))) {
    out.push_back(entry->id);
  } else {
    merge_piece(piece, out);
  }
}

// A vocabulary may contain entries that its merges never produce; those must not match a whole
// piece.
bool Bpe::reaches_itself(const PieceTable::Entry& entry, std::string_view piece) const {
  Reached reached = entry.reached.load(std::memory_order_relaxed);
  if (reached == Reached::kUnknown) [[unlikely]] {
    // Concurrent threads compute the same result.
    std::vector<int32_t> ids;
    merge_piece(piece, ids);
    reached = ids.size() == 1 && ids[0] == entry.id ? Reached::kYes : Reached::kNo;
    entry.reached.store(reached, std::memory_order_relaxed);
  }
  return reached == Reached::kYes;
}

void Bpe::merge_piece(std::string_view piece, std::vector<int32_t>& out) const {
  if (piece.size() <= kShortPiece) {
    merge_short(piece, out);
  } else {
    merge_long(piece, out);
  }
}

void Bpe::merge_short(std::string_view piece, std::vector<int32_t>& out) const {
  int32_t ids[kShortPiece];
  Merge with_next[kShortPiece];  // merge of tokens i and i + 1
  size_t count = 0;
  for (const char byte : piece) {
    const int32_t id = byte_id_[static_cast<uint8_t>(byte)];
    if (id >= 0) ids[count++] = id;
  }
  if (count == 0) return;
  for (size_t i = 0; i + 1 < count; ++i) with_next[i] = merges_.find(ids[i], ids[i + 1]);
  with_next[count - 1] = {};
  for (;;) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; ++i) {
      if (with_next[i].rank < with_next[best].rank) best = i;
    }
    if (with_next[best].rank == Merge::kNone) break;
    ids[best] = with_next[best].id;
    std::copy(ids + best + 2, ids + count, ids + best + 1);
    std::copy(with_next + best + 1, with_next + count, with_next + best);
    --count;
    if (best > 0) with_next[best - 1] = merges_.find(ids[best - 1], ids[best]);
    with_next[best] = best + 1 < count ? merges_.find(ids[best], ids[best + 1]) : Merge{};
  }
  out.insert(out.end(), ids, ids + count);
}

// O(n log n): a heap of candidate merges over a doubly linked list. A candidate whose tokens have
// since merged with others is skipped when it is popped.
void Bpe::merge_long(std::string_view piece, std::vector<int32_t>& out) const {
  // Rank in the high bits, position in the low ones: lowest rank, then leftmost.
  constexpr uint64_t kPositionBits = 40;
  constexpr size_t kNone = SIZE_MAX;
  struct Token {
    int32_t id;  // -1: merged into its left neighbour
    uint32_t rank_with_next;
    size_t previous, next;
  };
  std::vector<Token> tokens;
  tokens.reserve(piece.size());
  for (const char byte : piece) {
    const int32_t id = byte_id_[static_cast<uint8_t>(byte)];
    const size_t i = tokens.size();
    if (id >= 0) tokens.push_back({id, Merge::kNone, i == 0 ? kNone : i - 1, i + 1});
  }
  if (tokens.empty()) return;
  tokens.back().next = kNone;

  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> candidates;
  const auto consider = [&](size_t i) {
    Token& token = tokens[i];
    token.rank_with_next =
        token.next == kNone ? Merge::kNone : merges_.find(token.id, tokens[token.next].id).rank;
    if (token.rank_with_next != Merge::kNone) {
      candidates.push(static_cast<uint64_t>(token.rank_with_next) << kPositionBits | i);
    }
  };
  for (size_t i = 0; i < tokens.size(); ++i) consider(i);
  while (!candidates.empty()) {
    const uint64_t top = candidates.top();
    candidates.pop();
    const size_t i = top & ((uint64_t{1} << kPositionBits) - 1);
    Token& token = tokens[i];
    if (token.id < 0 || token.rank_with_next != top >> kPositionBits) continue;
    Token& absorbed = tokens[token.next];
    token.id = merges_.find(token.id, absorbed.id).id;
    absorbed.id = -1;
    token.next = absorbed.next;
    if (token.next != kNone) tokens[token.next].previous = i;
    consider(i);
    if (token.previous != kNone) consider(token.previous);
  }
  for (size_t i = 0; i != kNone; i = tokens[i].next) out.push_back(tokens[i].id);
}

}  // namespace fathom
