// Which replica has seen which beginnings of prompts: a radix tree over bytes, as an approximation
// of what the replicas' prefix caches hold.
//
// Holders are replicas' numbers. A holder of a node holds all nodes above it. The tree is bounded:
// beyond `max_bytes` the least recently used leaves go. Not thread-safe.
#pragma once

#include <cstdint>
#include <list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fathom::router {

class TextTree {
 public:
  explicit TextTree(int64_t max_bytes) : max_bytes_(max_bytes) {}
  TextTree(const TextTree&) = delete;
  TextTree& operator=(const TextTree&) = delete;

  struct Match {
    int64_t holder = 0;
    int64_t bytes = 0;  // length of the common prefix, at least 1
  };
  // Returns each holder's longest prefix of `text`, holders in any order. What matched counts as
  // used.
  std::vector<Match> match(std::string_view text);

  // Records that `holder` has `text`. A text longer than the whole bound is cut to fit.
  void insert(std::string_view text, int64_t holder);

  // Forgets what a holder has: its cache is gone.
  void forget(int64_t holder);

  int64_t bytes() const { return bytes_; }  // text and nodes
  int64_t nodes() const { return std::ssize(nodes_); }
  int64_t evictions() const { return evictions_; }  // nodes

 private:
  struct Node;
  // All nodes but the root, most recently used first. Every use of a node is one of its parent, and
  // the parent is moved after it: so children stand behind their parents, and the last is a leaf.
  using Nodes = std::list<Node>;
  struct Child {
    char first = 0;
    Nodes::iterator node;
  };
  struct Node {
    std::string text;  // of the edge that leads here; not empty
    Node* parent = nullptr;
    std::vector<Child> children = {};
    std::vector<int64_t> holders = {};
    Nodes::iterator self = {};
  };

  static Child* child_at(Node& node, char first);
  Node& add_child(Node& parent, std::string_view text);
  void split(Node& node, size_t at);
  void add_holder(Node& node, int64_t holder);
  void use(Node* node);
  void erase(Nodes::iterator node);
  static int64_t cost(const Node& node);

  const int64_t max_bytes_;
  Node root_{.text = {}};
  Nodes nodes_;
  int64_t bytes_ = 0, evictions_ = 0;
};

}  // namespace fathom::router
