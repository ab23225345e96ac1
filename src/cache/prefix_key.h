// Keys of prefixes: the key of page i of a text is a keyed 128-bit hash of the key of page i - 1
// and the page's 64 tokens, so that equal keys mean equal tokens from the first one on.
//
// The hash's secret is random in each process. XXH3 is no cryptographic hash, but keys never leave
// the process, so they cannot reveal the secret, and PrefixTree compares the tokens of equal keys,
// too: a collision costs a hit, it never shows a text to another request.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace fathom {

struct PageKey {
  uint64_t low = 0, high = 0;
  friend bool operator==(const PageKey&, const PageKey&) = default;
};

// For hash tables: the key is a hash already.
struct PageKeyHash {
  size_t operator()(const PageKey& key) const { return key.low; }
};

class PrefixHasher {
 public:
  PrefixHasher();  // a new secret from the system's entropy

  // The key before the first page: texts of different scopes or salts have no key in common.
  PageKey root(uint64_t scope, std::string_view salt) const;

  // tokens [kPageSize]
  PageKey extend(const PageKey& parent, std::span<const int32_t> tokens) const;

 private:
  alignas(64) std::array<std::byte, 192> secret_;  // XXH3's own length; it requires at least 136
};

}  // namespace fathom
