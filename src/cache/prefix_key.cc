#include "cache/prefix_key.h"

#define XXH_INLINE_ALL  // header only: nothing to link
#include <xxhash.h>

#include <cstring>
#include <random>
#include <string>

#include "base/check.h"
#include "cache/latent_layout.h"

namespace fathom {

PrefixHasher::PrefixHasher() {
  std::random_device entropy;
  for (size_t i = 0; i < secret_.size(); i += 4) {
    const uint32_t word = entropy();
    std::memcpy(&secret_[i], &word, 4);
  }
}

PageKey PrefixHasher::root(uint64_t scope, std::string_view salt) const {
  std::string bytes(sizeof scope, '\0');
  std::memcpy(bytes.data(), &scope, sizeof scope);
  bytes += salt;
  const XXH128_hash_t hash =
      XXH3_128bits_withSecret(bytes.data(), bytes.size(), secret_.data(), secret_.size());
  return {hash.low64, hash.high64};
}

PageKey PrefixHasher::extend(const PageKey& parent, std::span<const int32_t> tokens) const {
  struct {
    PageKey parent;
    int32_t tokens[kPageSize];
  } input;
  FATHOM_CHECK(tokens.size() == kPageSize, "a page of {} tokens", tokens.size());
  input.parent = parent;
  std::memcpy(input.tokens, tokens.data(), sizeof input.tokens);
  const XXH128_hash_t hash =
      XXH3_128bits_withSecret(&input, sizeof input, secret_.data(), secret_.size());
  return {hash.low64, hash.high64};
}

}  // namespace fathom
