// Finds added tokens ("<｜User｜>") in a text: the leftmost, and of those that begin there the
// longest. Filled once, then read by any thread.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace fathom {

class TokenTrie {
 public:
  struct Found {
    size_t begin = 0, end = 0;
    int32_t id = -1;
  };

  TokenTrie() { roots_.fill(kNone); }

  // Inserts a token. `content` must not be empty. Content that exists already keeps its first id.
  void insert(std::string_view content, int32_t id);

  std::optional<Found> find(std::string_view text, size_t from) const;

 private:
  static constexpr int32_t kNone = -1;
  struct Node {
    uint8_t byte = 0;
    int32_t id = kNone;  // the token that ends here
    int32_t first_child = kNone, next_sibling = kNone;
  };
  int32_t child(int32_t node, uint8_t byte) const;

  std::array<int32_t, 256> roots_;  // by first byte
  std::vector<Node> nodes_;
};

}  // namespace fathom
