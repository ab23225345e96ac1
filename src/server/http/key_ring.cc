#include "server/http/key_ring.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>

namespace fathom::http {
namespace {

Result<> check_key(std::string_view kind, size_t number, std::string_view key) {
  if (key.empty()) return invalid("{} key {} is empty", kind, number);
  const auto visible = [](unsigned char c) { return c > 0x20 && c < 0x7F; };
  if (!std::all_of(key.begin(), key.end(), visible)) {
    return invalid("{} key {} has a character that is not visible ASCII", kind, number);
  }
  return {};
}

}  // namespace

std::vector<std::string_view> presented_keys(const Headers& headers) {
  constexpr std::string_view kScheme = "Bearer ";
  std::vector<std::string_view> keys;
  for (const Headers::Field& field : headers) {
    std::string_view value = field.value;
    if (equal_ignoring_case(field.name, "Authorization")) {
      if (!equal_ignoring_case(value.substr(0, kScheme.size()), kScheme)) continue;
      value.remove_prefix(kScheme.size());
      value.remove_prefix(std::min(value.find_first_not_of(' '), value.size()));
    } else if (!equal_ignoring_case(field.name, "X-Api-Key")) {
      continue;
    }
    if (!value.empty()) keys.push_back(value);
  }
  return keys;
}

KeyRing::Digest KeyRing::digest_of(std::string_view key) {
  Digest digest;
  SHA256(reinterpret_cast<const unsigned char*>(key.data()), key.size(), digest.data());
  return digest;
}

int64_t KeyRing::find(const std::vector<Digest>& digests, const Digest& wanted) {
  int64_t found = -1;
  for (int64_t i = 0; i < std::ssize(digests); ++i) {
    const Digest& digest = digests[static_cast<size_t>(i)];
    const bool equal = CRYPTO_memcmp(digest.data(), wanted.data(), wanted.size()) == 0;
    found = equal ? i : found;
  }
  return found;
}

Result<KeyRing> KeyRing::create(const std::vector<std::string>& api_keys,
                                const std::vector<std::string>& admin_keys) {
  KeyRing ring;
  for (const std::string& key : api_keys) {
    FATHOM_RETURN_IF_ERROR(check_key("API", ring.api_.size() + 1, key));
    ring.api_.push_back(digest_of(key));
  }
  for (const std::string& key : admin_keys) {
    FATHOM_RETURN_IF_ERROR(check_key("admin", ring.admin_.size() + 1, key));
    ring.admin_.push_back(digest_of(key));
  }
  return ring;
}

KeyRing::Verdict KeyRing::check(Access access, const Headers& headers, Caller* caller) const {
  if (access == Access::kPublic) return Verdict::kGranted;
  if (access == Access::kOperator) access = admin_.empty() ? Access::kKey : Access::kAdmin;
  const std::vector<std::string_view> keys = presented_keys(headers);
  bool is_api = false;
  for (const std::string_view key : keys) {
    const Digest digest = digest_of(key);
    const int64_t api = find(api_, digest), admin = find(admin_, digest);
    is_api |= api >= 0;
    caller->is_admin |= admin >= 0;
    if (api >= 0) caller->key = api;
    if (admin >= 0) caller->key = std::ssize(api_) + admin;
  }
  if (access == Access::kKey && api_.empty()) return Verdict::kGranted;
  if (access == Access::kAdmin && admin_.empty()) return Verdict::kAdminOff;
  if (caller->is_admin || (is_api && access == Access::kKey)) return Verdict::kGranted;
  if (is_api) return Verdict::kNotAdmin;
  return keys.empty() ? Verdict::kMissing : Verdict::kWrong;
}

}  // namespace fathom::http
