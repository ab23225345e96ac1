// Haystacks for the needle checkpoints (tools/make_needle.py), whose indexer finds the token that
// answers a question, in two layers one after the other. Each row chooses 64 keys.
//
// Needles lie where a choice goes wrong first: at the sequence's beginning, on both sides of a
// page's border, in the question's own page. Behind each question stand needles with wrong answers,
// which a row that saw too many keys would find.
#pragma once

#include <cstdint>
#include <vector>

#include "base/check.h"
#include "base/random.h"
#include "cache/cache_format.h"

namespace fathom {

inline constexpr int32_t kNames = 16, kFillers = 48;  // tools/make_needle.py
inline constexpr int64_t kTopk = 64;
inline constexpr int64_t kQuestions = 7;

inline int32_t question(int32_t about) { return about; }
inline int32_t needle(int32_t key, int32_t value) { return kNames + key * kNames + value; }
inline int32_t filler(int64_t position) {
  return kNames + kNames * kNames +
         static_cast<int32_t>(random_bits(20, 0, static_cast<uint64_t>(position)) % kFillers);
}

struct Asked {
  int64_t position;
  int32_t answer;
  int64_t first, second;  // where the needles are
};

struct Haystack {
  std::vector<int32_t> ids;
  std::vector<Asked> asked;

  explicit Haystack(int64_t length) : ids(static_cast<size_t>(length), -1) {
    const int64_t half = length / 2, end = length - 1;
    ask(end, 0, 1);
    ask(half, kPageSize - 1, kPageSize);                        // a page's first row
    ask(3 * half / 2 + 5, 3 * half / 2 + 3, 3 * half / 2 + 4);  // of the question's own page
    const int64_t page = half / 2;
    ask(page + kPageSize - 1, page - 1, page);  // a page's last row, and that page's border
    ask(kTopk + 2, 10, 40);                     // the first rows that choose
    ask(end - 8, 9 * length / 10, length / 10);
    ask(half + 700, half + 699, half - 1300);
    for (int64_t i = 0; i < length; ++i) {
      if (ids[static_cast<size_t>(i)] < 0) ids[static_cast<size_t>(i)] = filler(i);
    }
  }

  // Two names of its own for each question: a is b, and b is the answer.
  void ask(int64_t position, int64_t first, int64_t second) {
    const auto a = static_cast<int32_t>(2 * asked.size() + 1), b = a + 1;
    const int32_t answer = (a + 6) % 15 + 1, wrong = (a + 9) % 15 + 1;
    put(first, needle(a, b));
    put(second, needle(b, answer));
    put(position, question(a));
    asked.push_back({position, answer, first, second});
    for (int64_t i = 0; i < 6 && position + 6 < std::ssize(ids); ++i) {
      put(position + 1 + i, needle(i % 2 == 0 ? a : b, wrong));
    }
  }

  void put(int64_t position, int32_t token) {
    int32_t& place = ids.at(static_cast<size_t>(position));
    FATHOM_CHECK(place < 0, "two tokens at {}", position);
    place = token;
  }
};

}  // namespace fathom
