// Byte-pair merging, compared with a step-by-step implementation of the definition.
#include "tokenizer/bpe.h"

#include <gtest/gtest.h>

#include <random>

namespace fathom {
namespace {

struct Vocabulary {
  std::vector<Bpe::Entry> entries;
  std::vector<Bpe::NamedMerge> merges;
};

Vocabulary all_bytes() {
  Vocabulary v;
  for (int byte = 0; byte < 256; ++byte) {
    v.entries.push_back({std::string(1, static_cast<char>(byte)), byte, true});
  }
  return v;
}

void add_merge(Vocabulary& v, const std::string& left, const std::string& right) {
  v.merges.push_back({left, right});
  for (const auto& entry : v.entries) {
    if (entry.bytes == left + right) return;
  }
  v.entries.push_back({left + right, static_cast<int32_t>(v.entries.size()), true});
}

// A vocabulary of random merges over two or three letters, so that merges overlap in every way.
Vocabulary random_vocabulary(std::mt19937& random, int letters, int merges) {
  Vocabulary v = all_bytes();
  std::vector<std::string> parts;
  for (int i = 0; i < letters; ++i) parts.push_back(std::string(1, static_cast<char>('a' + i)));
  for (int i = 0; i < merges; ++i) {
    const std::string left = parts[random() % parts.size()], right = parts[random() % parts.size()];
    if (left.size() + right.size() > 24) continue;
    const bool known = std::any_of(v.merges.begin(), v.merges.end(), [&](const auto& merge) {
      return merge.left == left && merge.right == right;
    });
    if (known) continue;
    add_merge(v, left, right);
    parts.push_back(left + right);
  }
  return v;
}

// The definition: while some adjacent pair merges, merge the leftmost pair of lowest rank.
std::vector<std::string> merged_by_definition(const Vocabulary& v, const std::string& piece) {
  std::vector<std::string> tokens;
  for (const char c : piece) tokens.push_back(std::string(1, c));
  for (;;) {
    size_t best_rank = v.merges.size(), best = 0;
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      for (size_t rank = 0; rank < best_rank; ++rank) {
        if (v.merges[rank].left == tokens[i] && v.merges[rank].right == tokens[i + 1]) {
          best_rank = rank;
          best = i;
        }
      }
    }
    if (best_rank == v.merges.size()) return tokens;
    tokens[best] += tokens[best + 1];
    tokens.erase(tokens.begin() + static_cast<int64_t>(best) + 1);
  }
}

std::vector<std::string> tokens_of(const Bpe& bpe, const std::string& piece) {
  std::vector<int32_t> ids;
  bpe.encode_piece(piece, ids);
  std::vector<std::string> tokens;
  for (const int32_t id : ids) tokens.emplace_back(bpe.bytes_of(id));
  return tokens;
}

TEST(Bpe, IsTheDefinitionOnRandomVocabularies) {
  std::mt19937 random(20240501);
  for (int round = 0; round < 60; ++round) {
    const int letters = 1 + static_cast<int>(random() % 3);
    const Vocabulary v = random_vocabulary(random, letters, 40);
    const auto bpe = Bpe::build(v.entries, v.merges, false);
    ASSERT_TRUE(bpe) << bpe.error().message;
    for (int i = 0; i < 20; ++i) {
      // Sizes on both sides of the switch from the short to the long algorithm (64 bytes).
      std::string piece(1 + random() % 90, 'a');
      for (char& c : piece) c = static_cast<char>('a' + random() % letters);
      ASSERT_EQ(tokens_of(*bpe, piece), merged_by_definition(v, piece)) << piece;
    }
  }
}

TEST(Bpe, AnEntryThatMergesDoNotReachIsNotTaken) {
  Vocabulary v = all_bytes();
  add_merge(v, "b", "c");
  add_merge(v, "a", "b");
  add_merge(v, "ab", "c");  // never applies to "abc", since b and c merge first
  const auto bpe = Bpe::build(v.entries, v.merges, false);
  ASSERT_TRUE(bpe);
  const std::vector<std::string> expected = {"a", "bc"};
  EXPECT_EQ(tokens_of(*bpe, "abc"), expected);
  EXPECT_EQ(tokens_of(*bpe, "abc"), expected);  // again, with the cached result
  const auto ignoring = Bpe::build(v.entries, v.merges, true);
  ASSERT_TRUE(ignoring);
  EXPECT_EQ(tokens_of(*ignoring, "abc"), std::vector<std::string>{"abc"});
}

TEST(Bpe, LongRunsAreNotQuadratic) {
  Vocabulary v = all_bytes();
  for (int size = 1; size <= 64; size *= 2)
    add_merge(v, std::string(size, 'a'), std::string(size, 'a'));
  const auto bpe = Bpe::build(v.entries, v.merges, false);
  ASSERT_TRUE(bpe);
  std::vector<int32_t> ids;
  bpe->encode_piece(std::string(1 << 20, 'a'), ids);
  EXPECT_EQ(ids.size(), (1u << 20) / 128);
  ids.clear();
  bpe->encode_piece(std::string(1 << 20, 'b'), ids);
  EXPECT_EQ(ids.size(), 1u << 20);
}

TEST(Bpe, FindsEntriesOfEveryLength) {
  Vocabulary v = all_bytes();
  std::string text;
  for (int size = 2; size < 60; ++size) {
    text.assign(size, 'x');
    text[size / 2] = 'y';
    v.entries.push_back({text, 300 + size, true});
  }
  const auto bpe = Bpe::build(v.entries, {}, true);
  ASSERT_TRUE(bpe);
  for (const auto& entry : v.entries) {
    EXPECT_EQ(bpe->find(entry.bytes), entry.id);
    EXPECT_EQ(bpe->bytes_of(entry.id), entry.bytes);
    EXPECT_EQ(bpe->find(entry.bytes + "?"), -1);
  }
  EXPECT_EQ(bpe->bytes_of(299), "");
  EXPECT_EQ(bpe->bytes_of(-1), "");
  EXPECT_EQ(bpe->bytes_of(100000), "");
}

}  // namespace
}  // namespace fathom
