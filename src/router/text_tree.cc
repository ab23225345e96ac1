#include "router/text_tree.h"

#include <algorithm>

namespace fathom::router {
namespace {

size_t common_prefix(std::string_view a, std::string_view b) {
  const size_t size = std::min(a.size(), b.size());
  const auto end = a.begin() + static_cast<std::ptrdiff_t>(size);
  return static_cast<size_t>(std::mismatch(a.begin(), end, b.begin()).first - a.begin());
}

}  // namespace

// The text, the node with its links in the list, its place in the parent, and the holders.
int64_t TextTree::cost(const Node& node) {
  return static_cast<int64_t>(node.text.size() + sizeof(Node) + 2 * sizeof(void*) + sizeof(Child)) +
         std::ssize(node.holders) * static_cast<int64_t>(sizeof(int64_t));
}

TextTree::Child* TextTree::child_at(Node& node, char first) {
  for (Child& child : node.children) {
    if (child.first == first) return &child;
  }
  return nullptr;
}

TextTree::Node& TextTree::add_child(Node& parent, std::string_view text) {
  nodes_.push_front({.text = std::string(text), .parent = &parent});
  Node& node = nodes_.front();
  node.self = nodes_.begin();
  parent.children.push_back({text.front(), node.self});
  bytes_ += cost(node);
  return node;
}

// Cuts a node's edge in two: the node keeps the end, a new parent gets the beginning.
void TextTree::split(Node& node, size_t at) {
  bytes_ -= cost(node);
  const auto upper = nodes_.insert(node.self, {.text = node.text.substr(0, at),
                                               .parent = node.parent,
                                               .children = {},
                                               .holders = node.holders});
  upper->self = upper;
  child_at(*node.parent, node.text.front())->node = upper;
  node.text.erase(0, at);
  node.text.shrink_to_fit();
  node.parent = &*upper;
  upper->children.push_back({node.text.front(), node.self});
  bytes_ += cost(node) + cost(*upper);
}

void TextTree::add_holder(Node& node, int64_t holder) {
  if (std::find(node.holders.begin(), node.holders.end(), holder) != node.holders.end()) return;
  node.holders.push_back(holder);
  bytes_ += static_cast<int64_t>(sizeof(int64_t));
}

void TextTree::use(Node* node) {
  for (; node != &root_; node = node->parent) nodes_.splice(nodes_.begin(), nodes_, node->self);
}

void TextTree::erase(Nodes::iterator node) {
  bytes_ -= cost(*node);
  std::erase_if(node->parent->children, [&](const Child& child) { return child.node == node; });
  nodes_.erase(node);
}

std::vector<TextTree::Match> TextTree::match(std::string_view text) {
  std::vector<Match> found;
  Node* node = &root_;
  int64_t depth = 0;
  while (!text.empty()) {
    Child* child = child_at(*node, text.front());
    if (child == nullptr) break;
    Node& next = *child->node;
    const size_t common = common_prefix(next.text, text);
    depth += static_cast<int64_t>(common);
    for (const int64_t holder : next.holders) {
      const auto known = std::find_if(found.begin(), found.end(),
                                      [&](const Match& match) { return match.holder == holder; });
      if (known == found.end()) {
        found.push_back({holder, depth});
      } else {
        known->bytes = depth;
      }
    }
    node = &next;
    if (common < next.text.size()) break;
    text.remove_prefix(common);
  }
  use(node);
  return found;
}

void TextTree::insert(std::string_view text, int64_t holder) {
  const int64_t one_node = cost(root_) + static_cast<int64_t>(sizeof(int64_t));
  text = text.substr(0, static_cast<size_t>(std::max<int64_t>(0, max_bytes_ / 2 - one_node)));
  Node* node = &root_;
  while (!text.empty()) {
    Child* child = child_at(*node, text.front());
    if (child == nullptr) {
      node = &add_child(*node, text);
      add_holder(*node, holder);
      break;
    }
    Node* next = &*child->node;
    const size_t common = common_prefix(next->text, text);
    if (common < next->text.size()) {
      split(*next, common);
      next = next->parent;
    }
    add_holder(*next, holder);
    text.remove_prefix(common);
    node = next;
  }
  use(node);
  while (bytes_ > max_bytes_ && !nodes_.empty()) {
    erase(std::prev(nodes_.end()));
    ++evictions_;
  }
}

void TextTree::forget(int64_t holder) {
  // From the last: children stand behind their parents, and a node without holders has no children
  // with any.
  for (auto node = nodes_.end(); node != nodes_.begin();) {
    --node;
    if (std::erase(node->holders, holder) == 0) continue;
    bytes_ -= static_cast<int64_t>(sizeof(int64_t));
    if (!node->holders.empty()) continue;
    const auto emptied = node++;
    erase(emptied);
  }
}

}  // namespace fathom::router
