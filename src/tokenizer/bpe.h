// Byte-pair encoding (Sennrich et al. 2016) over bytes. A piece starts as the tokens of its bytes.
// While any adjacent pair can merge, the pair of lowest rank merges, the leftmost first.
//
// Owns the vocabulary. Immutable except for cached results; any thread may encode.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "tokenizer/merge_table.h"
#include "tokenizer/piece_table.h"

namespace fathom {

class Bpe {
 public:
  // Limits that keep ids, ranks and positions within the integer widths used here. The family's
  // largest vocabulary has 163,840 entries.
  static constexpr int32_t kMaxIds = 1 << 20;
  static constexpr size_t kMaxMerges = (size_t{1} << 24) - 1;

  struct Entry {
    std::string bytes;
    int32_t id = -1;
    bool mergeable = true;  // false: not written in byte glyphs, so no text encodes to it
  };
  struct NamedMerge {
    std::string left, right;  // bytes
  };

  // Entries must have distinct ids below kMaxIds. Errors name the entry or the merge, not the file.
  static Result<Bpe> build(const std::vector<Entry>& entries, const std::vector<NamedMerge>& merges,
                           bool ignore_merges);

  // A vocabulary whose ids are ranks (tiktoken): any two tokens merge whose bytes together are a
  // token, that of lowest id first, and a piece that is a token is that token.
  static Result<Bpe> from_ranks(const std::vector<Entry>& entries);

  // Appends the tokens of one piece.
  void encode_piece(std::string_view piece, std::vector<int32_t>& out) const;

  // The id of the mergeable entry with these bytes, or -1.
  int32_t find(std::string_view bytes) const;

  // The bytes of an id; empty if it is not in the vocabulary.
  std::string_view bytes_of(int32_t id) const;

  int32_t end_id() const { return static_cast<int32_t>(begin_.size()) - 1; }  // highest id + 1

 private:
  explicit Bpe(const std::vector<Entry>& entries);
  Result<> add_entries(const std::vector<Entry>& entries);
  Result<> add_merges(const std::vector<NamedMerge>& merges);
  void add_all_splits();
  void merge_piece(std::string_view piece, std::vector<int32_t>& out) const;
  void merge_short(std::string_view piece, std::vector<int32_t>& out) const;
  void merge_long(std::string_view piece, std::vector<int32_t>& out) const;
  bool reaches_itself(const PieceTable::Entry& entry, std::string_view piece) const;

  std::string blob_;             // the bytes of all entries, by id
  std::vector<uint32_t> begin_;  // [highest id + 2] offsets into blob_
  std::array<int32_t, 256> byte_id_{};
  PieceTable pieces_;
  MergeTable merges_{0};
  bool ignore_merges_ = false;
};

}  // namespace fathom
