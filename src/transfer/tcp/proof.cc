#include "transfer/tcp/proof.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <cstring>
#include <vector>

#include "base/check.h"

namespace fathom {

Nonce random_nonce() {
  Nonce nonce;
  const int got =
      RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), static_cast<int>(nonce.size()));
  FATHOM_CHECK(got == 1, "the system has no random numbers");
  return nonce;
}

Proof make_proof(std::string_view secret, ProofOf who, const Handshake& handshake) {
  std::vector<std::byte> text;
  const auto add = [&](const void* data, size_t size) {
    const auto* const bytes = static_cast<const std::byte*>(data);
    text.insert(text.end(), bytes, bytes + size);
  };
  const std::string_view name =
      who == ProofOf::kDecode ? "fathom transfer, decode" : "fathom transfer, prefill";
  add(name.data(), name.size());
  add(handshake.decode.data(), handshake.decode.size());
  add(handshake.prefill.data(), handshake.prefill.size());
  add(&handshake.kind, sizeof handshake.kind);
  add(&handshake.session, sizeof handshake.session);
  Proof proof;
  unsigned int size = 0;
  // An empty key is a key: without a secret anybody can prove it.
  const void* const key = secret.empty() ? "" : secret.data();
  const auto* const done = HMAC(EVP_sha256(), key, static_cast<int>(secret.size()),
                                reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                                reinterpret_cast<unsigned char*>(proof.data()), &size);
  FATHOM_CHECK(done != nullptr && size == proof.size(), "HMAC-SHA256 gave {} bytes", size);
  return proof;
}

bool equal_proofs(const Proof& one, const Proof& other) {
  return CRYPTO_memcmp(one.data(), other.data(), one.size()) == 0;
}

}  // namespace fathom
