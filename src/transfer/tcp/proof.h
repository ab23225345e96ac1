// Proofs that both ends of a connection have the same secret, without sending it.
//
// Each end sends a nonce of its own; a proof is HMAC-SHA256 over who proves it, both nonces and
// what the connection is for. So a recorded handshake proves nothing a second time, and no end's
// proof serves for the other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace fathom {

using Nonce = std::array<std::byte, 32>;
using Proof = std::array<std::byte, 32>;

enum class ProofOf : uint8_t { kDecode, kPrefill };

struct Handshake {
  Nonce decode{}, prefill{};
  uint32_t kind = 0;     // of the connection
  uint64_t session = 0;  // as the hello said
};

// Returns random bytes from the operating system.
Nonce random_nonce();

Proof make_proof(std::string_view secret, ProofOf who, const Handshake& handshake);
// Takes the same time wherever they differ.
bool equal_proofs(const Proof& one, const Proof& other);

}  // namespace fathom
