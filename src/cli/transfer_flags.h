// The flags of `fathom serve` with which prompts are computed by other processes (--role,
// --transfer-addr, --prefill, --transfer-secret) or by other ranks of this one (--prefill-ranks,
// --decode-ranks).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "cli/flags.h"
#include "cli/model_flags.h"
#include "comm/socket.h"
#include "transfer/piece_lane.h"

namespace fathom {

struct TransferFlags {
  std::string role = "both";
  std::string address;               // HOST:PORT
  std::vector<std::string> prefill;  // HOST:PORT, or several with commas
  std::string secret, secret_file;
  bool digests = false;
  int64_t window_mib = 64;
  std::string backend = "auto";
  std::string prefill_ranks, decode_ranks;  // numbers with commas
};

void add_transfer_flags(CLI::App& command, TransferFlags* flags);

enum class TransferRole { kBoth, kPrefill, kDecode };

// What the flags ask for.
struct TransferPlan {
  TransferRole role = TransferRole::kBoth;
  std::optional<Endpoint> listen;  // takes orders of others
  std::vector<Endpoint> peers;     // compute this side's prompts
  std::string secret;              // empty: only this machine's addresses
  bool digests = false;
  int64_t window_bytes = 0;
  MakeLane make_lane;       // empty: pages go by TCP
  bool needs_lane = false;  // pages never go by TCP
  // Lanes by role, in one process; none: all lanes are of one engine.
  std::vector<int> prefill_lanes, decode_lanes;

  bool has_sites() const { return !prefill_lanes.empty(); }
  bool is_separated() const { return listen.has_value() || !peers.empty(); }
};

// Errors name the flag, and what another flag asks for that cannot go with it.
Result<TransferPlan> transfer_plan(const TransferFlags& flags, const ModelFlags& model);

}  // namespace fathom
