// API keys and admin keys. Only their SHA-256 digests are kept.
//
// The comparison takes constant time: the presented key is hashed (time depends on its length
// alone), its 32 bytes are compared with every stored digest by CRYPTO_memcmp, and no comparison is
// skipped.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/http/message.h"
#include "server/http/route_table.h"

namespace fathom::http {

class KeyRing {
 public:
  // Error: kInvalidArgument for a key that no header can carry (empty, or not visible ASCII).
  static Result<KeyRing> create(const std::vector<std::string>& api_keys,
                                const std::vector<std::string>& admin_keys);

  enum class Verdict { kGranted, kMissing, kWrong, kNotAdmin, kAdminOff };
  // Checks all keys that the headers present ("Authorization: Bearer KEY", "X-Api-Key: KEY"). Fills
  // `caller`, except on public routes.
  Verdict check(Access access, const Headers& headers, Caller* caller) const;

 private:
  using Digest = std::array<unsigned char, 32>;
  static Digest digest_of(std::string_view key);
  static int64_t find(const std::vector<Digest>& digests, const Digest& wanted);  // -1: not found

  std::vector<Digest> api_, admin_;
};

// Returns the presented keys in header order, as views into `headers`.
std::vector<std::string_view> presented_keys(const Headers& headers);

}  // namespace fathom::http
