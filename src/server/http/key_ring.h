// The keys that open routes. Only SHA-256 digests of them are kept.
//
// The comparison takes the same time whether and where a presented key differs, by construction:
// the presented key is hashed (time depends on its own length alone), its 32 bytes are compared
// with every stored digest by CRYPTO_memcmp, and no comparison is left out.
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
  // kInvalidArgument for a key that no header could carry: empty, or not visible ASCII.
  static Result<KeyRing> create(const std::vector<std::string>& api_keys,
                                const std::vector<std::string>& admin_keys);

  enum class Verdict { kGranted, kMissing, kWrong, kNotAdmin, kAdminOff };
  // By all keys that the headers present ("Authorization: Bearer KEY", "X-Api-Key: KEY").
  // Fills `caller`, except on public routes.
  Verdict check(Access access, const Headers& headers, Caller* caller) const;

 private:
  using Digest = std::array<unsigned char, 32>;
  static Digest digest_of(std::string_view key);
  static int64_t find(const std::vector<Digest>& digests, const Digest& wanted);  // -1: not there

  std::vector<Digest> api_, admin_;
};

// The keys presented in headers, in order; views of their values.
std::vector<std::string_view> presented_keys(const Headers& headers);

}  // namespace fathom::http
