#include "cli/transfer_flags.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <fstream>

#include "server/http/host.h"
#include "transfer/ucx/ucx_lane.h"

namespace fathom {
namespace {

// Shorter secrets can be guessed by trying.
constexpr size_t kLeastSecretBytes = 16;

Result<std::string> secret_of(const TransferFlags& flags) {
  std::string secret = flags.secret;
  if (!flags.secret_file.empty()) {
    if (!secret.empty()) {
      return invalid(
          "--transfer-secret and --transfer-secret-file both give a secret, only one may");
    }
    std::ifstream file(flags.secret_file);
    if (!file || !std::getline(file, secret)) {
      return not_found("--transfer-secret-file: {} cannot be read", flags.secret_file);
    }
    if (!secret.empty() && secret.back() == '\r') secret.pop_back();
  } else if (secret.empty()) {
    return secret;
  }
  if (secret.size() < kLeastSecretBytes) {
    return invalid("--transfer-secret{} has {} bytes, must have {} or more",
                   flags.secret_file.empty() ? "" : "-file", secret.size(), kLeastSecretBytes);
  }
  return secret;
}

Result<Endpoint> endpoint_of(std::string_view flag, std::string_view text, bool has_secret) {
  auto endpoint = parse_endpoint(text);
  if (!endpoint) return invalid("{}: {}", flag, endpoint.error().message);
  if (!has_secret && !http::is_loopback_host(endpoint->host)) {
    return invalid(
        "{} is {}, only an address of this machine is allowed without --transfer-secret-file", flag,
        text);
  }
  return endpoint;
}

Result<> check_role(const TransferFlags& flags) {
  if (flags.role == "prefill" && flags.address.empty()) {
    return invalid("--role prefill needs --transfer-addr HOST:PORT, where it takes orders");
  }
  if (flags.role == "decode" && flags.prefill.empty()) {
    return invalid("--role decode needs --prefill HOST:PORT, where its prompts are computed");
  }
  if (flags.role == "decode" && !flags.address.empty()) {
    return invalid("--transfer-addr is {} with --role decode, which connects to the prefill side",
                   flags.address);
  }
  if (flags.role != "decode" && !flags.prefill.empty()) {
    return invalid("--prefill is {} with --role {}, it is for --role decode", flags.prefill.front(),
                   flags.role);
  }
  return {};
}

Result<> check_model(const ModelFlags& model) {
  if (model.kv_offload_gib > 0 || !model.kv_offload_dir.empty()) {
    return invalid(
        "--kv-offload-gib is {} and --kv-offload-dir '{}': not where prompts are computed for "
        "others or by others",
        model.kv_offload_gib, model.kv_offload_dir);
  }
  FATHOM_TRY(const NodePlace place, node_place(model.nodes));
  if (place.is_one_of_several()) {
    return invalid("--nnodes is {}, must be 1 where prompts are computed for others or by others",
                   place.nnodes);
  }
  return {};
}

// Ranks' numbers with commas.
Result<std::vector<int>> ranks_of(std::string_view flag, std::string_view text, int world) {
  std::vector<int> ranks;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    int& rank = ranks.emplace_back(-1);
    const auto read = std::from_chars(text.data() + begin, text.data() + end, rank);
    if (read.ec != std::errc() || read.ptr != text.data() + end || rank < 0) {
      return invalid("{} is '{}', expected numbers of ranks with commas", flag, text);
    }
    if (rank >= world) {
      return invalid("{} names rank {}, the ranks of --tp and --dp are 0 to {}", flag, rank,
                     world - 1);
    }
    begin = end + 1;
  }
  return ranks;
}

// What cannot go with roles of ranks.
Result<> check_sites(const TransferFlags& flags, const ModelFlags& model) {
  if (flags.prefill_ranks.empty() || flags.decode_ranks.empty()) {
    const bool is_prefill = flags.decode_ranks.empty();
    return invalid("--{}-ranks is {} without --{}-ranks: both roles need ranks",
                   is_prefill ? "prefill" : "decode", flags.prefill_ranks + flags.decode_ranks,
                   is_prefill ? "decode" : "prefill");
  }
  if (flags.role != "both" || !flags.address.empty()) {
    return invalid(
        "--prefill-ranks is {} with {}: ranks of one process have roles, or the process has one",
        flags.prefill_ranks,
        flags.role != "both" ? "--role " + flags.role : "--transfer-addr " + flags.address);
  }
  if (model.placement().exchanges_tokens()) {
    return invalid(
        "--prefill-ranks is {} with --enable-expert-parallel: ranks that exchange tokens step "
        "together",
        flags.prefill_ranks);
  }
  return check_model(model);
}

// The lanes by role: each rank has one, those of a lane the same.
Result<> choose_lanes(const TransferFlags& flags, const ModelFlags& model, TransferPlan& plan) {
  FATHOM_RETURN_IF_ERROR(model.check_ranks());
  const Placement placement = model.placement();
  const int world = placement.world();
  FATHOM_TRY(const auto prefill, ranks_of("--prefill-ranks", flags.prefill_ranks, world));
  FATHOM_TRY(const auto decode, ranks_of("--decode-ranks", flags.decode_ranks, world));
  for (int rank = 0; rank < world; ++rank) {
    const auto times = std::count(prefill.begin(), prefill.end(), rank) +
                       std::count(decode.begin(), decode.end(), rank);
    if (times == 0) {
      return invalid("rank {} is neither in --prefill-ranks nor in --decode-ranks: each has a role",
                     rank);
    }
    if (times > 1) {
      return invalid(
          "rank {} is named {} times by --prefill-ranks and --decode-ranks: it has one role", rank,
          times);
    }
  }
  for (int lane = 0; lane < placement.dp; ++lane) {
    const int first = placement.rank_of(lane, 0), last = placement.rank_of(lane, placement.tp - 1);
    const auto computing = std::count_if(prefill.begin(), prefill.end(),
                                         [&](int rank) { return rank >= first && rank <= last; });
    if (computing != 0 && computing != placement.tp) {
      return invalid("ranks {} to {} are one data-parallel rank of --tp {}: they have one role",
                     first, last, placement.tp);
    }
    (computing > 0 ? plan.prefill_lanes : plan.decode_lanes).push_back(lane);
  }
  return {};
}

Result<> choose_backend(const TransferFlags& flags, TransferPlan& plan) {
  if (flags.backend == "tcp") return {};
  plan.needs_lane = flags.backend == "ucx";
  const auto usable = check_ucx();
  if (usable) {
    plan.make_lane = make_ucx_lane;
  } else if (plan.needs_lane) {
    return with_context("--transfer-backend ucx: ", usable.error());
  }
  return {};
}

}  // namespace

void add_transfer_flags(CLI::App& command, TransferFlags* flags) {
  FlagGroup group(command, "Prefill and decode apart");
  group.choice("--role", &flags->role, {"both", "prefill", "decode"},
               "prefill: computes prompts for others only; decode: has its prompts computed by "
               "--prefill");
  group.text("--transfer-addr", &flags->address, "HOST:PORT",
             "Where this server takes the prompts of decode servers (--role prefill or both)");
  group.texts("--prefill", &flags->prefill, "HOST:PORT",
              "--transfer-addr of a server that computes this one's prompts (--role decode); "
              "several with commas");
  group.text("--transfer-secret", &flags->secret, "SECRET",
             "What both sides must know; better by a file or FATHOM_TRANSFER_SECRET");
  group.text("--transfer-secret-file", &flags->secret_file, "FILE",
             "File with the secret in its first line");
  group.toggle("--transfer-digests", &flags->digests,
               "Check a digest of each page that comes (--role decode)");
  group.count("--transfer-window-mib", &flags->window_mib, 1, 1 << 16,
              "Pages in MiB that may wait to be sent, or to be taken");
  group.choice("--transfer-backend", &flags->backend, {"auto", "tcp", "ucx"},
               "How pages go: auto takes shared memory (UCX) on one machine where both sides can, "
               "else TCP");
  group.text("--prefill-ranks", &flags->prefill_ranks, "RANKS",
             "Ranks of --tp and --dp that compute prompts for the others of this process, for "
             "example 0,1; with --decode-ranks");
  group.text("--decode-ranks", &flags->decode_ranks, "RANKS",
             "The other ranks, which decode; either side helps while the other has too much to do");
}

Result<TransferPlan> transfer_plan(const TransferFlags& flags, const ModelFlags& model) {
  FATHOM_RETURN_IF_ERROR(check_role(flags));
  TransferPlan plan;
  plan.role = flags.role == "prefill"  ? TransferRole::kPrefill
              : flags.role == "decode" ? TransferRole::kDecode
                                       : TransferRole::kBoth;
  FATHOM_TRY(plan.secret, secret_of(flags));
  plan.digests = flags.digests;
  plan.window_bytes = flags.window_mib << 20;
  const bool has_secret = !plan.secret.empty();
  if (!flags.address.empty()) {
    FATHOM_TRY(plan.listen, endpoint_of("--transfer-addr", flags.address, has_secret));
  }
  for (const std::string& list : flags.prefill) {
    for (size_t begin = 0; begin <= list.size();) {
      const size_t end = std::min(list.find(',', begin), list.size());
      FATHOM_TRY(plan.peers.emplace_back(),
                 endpoint_of("--prefill", list.substr(begin, end - begin), has_secret));
      begin = end + 1;
    }
  }
  if (!flags.prefill_ranks.empty() || !flags.decode_ranks.empty()) {
    FATHOM_RETURN_IF_ERROR(check_sites(flags, model));
    FATHOM_RETURN_IF_ERROR(choose_lanes(flags, model, plan));
  }
  if (plan.is_separated()) {
    FATHOM_RETURN_IF_ERROR(check_model(model));
    FATHOM_RETURN_IF_ERROR(choose_backend(flags, plan));
  }
  return plan;
}

}  // namespace fathom
