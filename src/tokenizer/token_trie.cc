#include "tokenizer/token_trie.h"

namespace fathom {

int32_t TokenTrie::child(int32_t node, uint8_t byte) const {
  int32_t next = nodes_[node].first_child;
  while (next != kNone && nodes_[next].byte != byte) next = nodes_[next].next_sibling;
  return next;
}

void TokenTrie::insert(std::string_view content, int32_t id) {
  const auto add_node = [&](uint8_t byte, int32_t sibling) {
    nodes_.push_back({byte, kNone, kNone, sibling});
    return static_cast<int32_t>(nodes_.size()) - 1;
  };
  const auto first = static_cast<uint8_t>(content[0]);
  if (roots_[first] == kNone) roots_[first] = add_node(first, kNone);
  int32_t node = roots_[first];
  for (const char c : content.substr(1)) {
    const auto byte = static_cast<uint8_t>(c);
    int32_t next = child(node, byte);
    if (next == kNone) {
      next = add_node(byte, nodes_[node].first_child);
      nodes_[node].first_child = next;
    }
    node = next;
  }
  if (nodes_[node].id == kNone) nodes_[node].id = id;
}

std::optional<TokenTrie::Found> TokenTrie::find(std::string_view text, size_t from) const {
  if (nodes_.empty()) return std::nullopt;
  for (size_t begin = from; begin < text.size(); ++begin) {
    int32_t node = roots_[static_cast<uint8_t>(text[begin])];
    if (node == kNone) continue;
    Found found;
    for (size_t i = begin + 1;; ++i) {
      if (nodes_[node].id != kNone) found = {begin, i, nodes_[node].id};
      if (i >= text.size()) break;
      node = child(node, static_cast<uint8_t>(text[i]));
      if (node == kNone) break;
    }
    if (found.id != kNone) return found;
  }
  return std::nullopt;
}

}  // namespace fathom
