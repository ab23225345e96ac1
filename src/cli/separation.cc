#include "cli/separation.h"

#include <algorithm>

#include "base/entropy.h"
#include "base/log.h"
#include "base/random.h"
#include "base/version.h"
#include "cache/latent_layout.h"
#include "checkpoint/fingerprint.h"
#include "engine/local_prefill.h"
#include "server/metrics/metrics_text.h"

namespace fathom {
namespace {

// How long the start waits for the prefill side: for a refusal, not for one that is not there yet.
constexpr std::chrono::seconds kFirstAttempt{5};

// What must be equal on both sides, so that pages of one are pages of the other, computed from the
// same weights in the same types. Names are flags where there is one.
Result<Facts> facts_of(const LoadedEngine& loaded, const ModelFlags& flags) {
  FATHOM_TRY(std::string model, fingerprint(loaded.checkpoint));
  Facts facts = {
      {"version", program_version()},
      {"model files", std::move(model)},
      {"--load-format", flags.load_format},
      {"--kv-cache-dtype", std::string(name_of(loaded.cache_format))},
      {"--dtype", loaded.compute == DType::kF32 ? "float32" : "bfloat16"},
      {"--quantization", flags.quantization == "none" ? "auto" : flags.quantization},
      {"drafts by the MTP layer", loaded.max_drafts > 0 ? "on" : "off"},
      {"tokens of a page", std::to_string(kPageSize)},
      {"bytes of a page", std::to_string(loaded.page_bytes)},
  };
  if (const auto& indexer = loaded.checkpoint.config().indexer) {
    facts.emplace_back("--dsa-dense-threshold",
                       std::to_string(loaded.dense_keys.value_or(indexer->topk)));
  }
  if (flags.is_dummy()) facts.emplace_back("--seed", std::to_string(loaded.load.dummy_seed));
  return facts;
}

uint64_t form_of(const Facts& facts) {
  uint64_t form = 0;
  for (const auto& [name, value] : facts) {
    for (const std::string* text : {&name, &value}) {
      for (const char c : *text) form = mix64(form ^ static_cast<uint8_t>(c));
      form = mix64(form ^ 0x100);
    }
  }
  return form;
}

void write_orders(std::string_view labels, const PrefillStats& stats, std::string& out) {
  append_family(out, "fathom_prefill_orders_total", "counter",
                "Prompts ordered from prefill servers, by what became of them.");
  const auto order = [&](std::string_view outcome, int64_t count) {
    out += fmt::format("fathom_prefill_orders_total{{{},outcome=\"{}\"}} {}\n", labels, outcome,
                       count);
  };
  order("sent", stats.orders);
  order("arrived", stats.arrived);
  order("failed", stats.failed);
  append_family(out, "fathom_prefill_fallbacks_total", "counter",
                "Prompts that no prefill server computed: computed here, or refused with 503.");
  const auto fallback = [&](std::string_view what, int64_t count) {
    out += fmt::format("fathom_prefill_fallbacks_total{{{},outcome=\"{}\"}} {}\n", labels, what,
                       count);
  };
  fallback("computed_here", stats.computed_here);
  fallback("refused", stats.refused);
  append_family(out, "fathom_transfer_pieces_total", "counter",
                "Pages that came from prefill servers, by the verdict of their check.");
  for (size_t i = 0; i < kNumPieceVerdicts; ++i) {
    out += fmt::format("fathom_transfer_pieces_total{{{},verdict=\"{}\"}} {}\n", labels,
                       name_of(static_cast<PieceVerdict>(i)), stats.pieces[i]);
  }
  append_metric(out, "fathom_prefill_cached_tokens_total", "counter",
                "Prompt tokens found in prefill servers' caches and not in this one's.", labels,
                stats.cached_tokens);
}

void write_roles(std::string_view labels, const EngineStats& engine, std::string& out) {
  const RoleStats& roles = *engine.roles;
  append_family(out, "fathom_lane_role", "gauge",
                "What a data-parallel rank does now: prefill, decode or both; always 1.");
  for (size_t lane = 0; lane < engine.lanes.size(); ++lane) {
    const auto& prefill = roles.prefill_lanes;
    const bool computes =
        std::find(prefill.begin(), prefill.end(), static_cast<int>(lane)) != prefill.end();
    const bool is_both = computes ? roles.prefill_takes : roles.decode_computes;
    out += fmt::format("fathom_lane_role{{{},dp_rank=\"{}\",role=\"{}\"}} 1\n", labels, lane,
                       is_both    ? "both"
                       : computes ? "prefill"
                                  : "decode");
  }
  append_family(out, "fathom_role_changes_total", "counter",
                "Times that lanes of a role began to do both.");
  const auto changes = [&](std::string_view role, int64_t count) {
    out += fmt::format("fathom_role_changes_total{{{},role=\"{}\"}} {}\n", labels, role, count);
  };
  changes("prefill", roles.prefill_changes);
  changes("decode", roles.decode_changes);
  append_metric(out, "fathom_role_prompts_total", "counter",
                "Prompts that lanes of --decode-ranks computed while they did both.", labels,
                roles.prompts_kept);
  append_metric(out, "fathom_role_requests_total", "counter",
                "Requests that lanes of --prefill-ranks took while they did both.", labels,
                roles.requests_taken);
}

void write_peers(std::string_view labels, const PrefillPeersStats& stats, std::string& out) {
  const auto counter = [&](std::string_view name, int64_t number, std::string_view help) {
    append_metric(out, name, "counter", help, labels, number);
  };
  append_metric(out, "fathom_prefill_servers", "gauge", "Prefill servers named by --prefill.",
                labels, stats.peers);
  append_metric(out, "fathom_prefill_servers_ready", "gauge", "Those that take orders.", labels,
                stats.ready);
  append_metric(out, "fathom_prefill_orders_held", "gauge",
                "Prompts that wait at prefill servers or are computed there.", labels,
                stats.orders);
  counter("fathom_transfer_received_bytes_total", stats.bytes_received, "Bytes of pages received.");
  counter("fathom_transfer_received_by_ucx_total", stats.lane_pieces_received,
          "Pages received through UCX, not TCP.");
  counter("fathom_transfer_unordered_pieces_total", stats.foreign_pieces,
          "Pages that no order of their connection asked for; dropped.");
  counter("fathom_transfer_stalled_pieces_total", stats.stalled_pieces,
          "Pages whose rest did not come in time; their connections were given up.");
  counter("fathom_transfer_sessions_lost_total", stats.sessions_lost,
          "Connections to prefill servers that were lost.");
  counter("fathom_transfer_refused_total", stats.refused,
          "Attempts to connect that a prefill server refused.");
}

void write_server(std::string_view labels, const TransferServerStats& stats, std::string& out) {
  const auto counter = [&](std::string_view name, int64_t number, std::string_view help) {
    append_metric(out, name, "counter", help, labels, number);
  };
  append_metric(out, "fathom_transfer_sessions", "gauge", "Decode servers that are connected.",
                labels, stats.sessions);
  counter("fathom_transfer_orders_total", stats.orders, "Prompts ordered by decode servers.");
  counter("fathom_transfer_sent_pieces_total", stats.pieces_sent, "Pages sent to decode servers.");
  counter("fathom_transfer_sent_by_ucx_total", stats.lane_pieces_sent,
          "Pages sent through UCX, not TCP.");
  counter("fathom_transfer_sent_bytes_total", stats.bytes_sent, "Bytes of them, with headers.");
  append_family(out, "fathom_transfer_refused_connections_total", "counter",
                "Connections at --transfer-addr that were refused, by reason.");
  for (size_t i = 0; i < kNumConnectionRefusals; ++i) {
    out += fmt::format("fathom_transfer_refused_connections_total{{{},reason=\"{}\"}} {}\n", labels,
                       name_of(static_cast<ConnectionRefusal>(i)), stats.refused[i]);
  }
}

}  // namespace

Result<PrefillOptions> Separated::connect(const LoadedEngine& loaded) {
  PrefillOptions options;
  if (plan_.peers.empty()) return options;
  if (loaded.page_bytes == 0) return invalid("--role decode: this device cannot take pages");
  FATHOM_TRY(const Facts facts, facts_of(loaded, model_));
  options.form = form_of(facts);
  options.with_digests = plan_.digests;
  options.mailbox = std::make_shared<PieceMailbox>(plan_.window_bytes);
  peers_ = std::make_shared<PrefillPeers>(PrefillPeersOptions{.peers = plan_.peers,
                                                              .secret = plan_.secret,
                                                              .facts = facts,
                                                              .page_bytes = loaded.page_bytes,
                                                              .make_lane = plan_.make_lane,
                                                              .needs_lane = plan_.needs_lane},
                                          options.mailbox);
  FATHOM_RETURN_IF_ERROR(peers_->wait_until_tried(kFirstAttempt));
  options.link = peers_;
  return options;
}

Result<> Separated::listen(const LoadedEngine& loaded) {
  if (!plan_.listen) return {};
  if (loaded.page_bytes == 0) return invalid("--transfer-addr: this device cannot send pages");
  FATHOM_TRY(const Facts facts, facts_of(loaded, model_));
  engine_ = unpredictable_bits();
  const TransferServerOptions options{.listen = *plan_.listen,
                                      .secret = plan_.secret,
                                      .facts = facts,
                                      .engine = engine_,
                                      .form = form_of(facts),
                                      .page_bytes = loaded.page_bytes,
                                      .max_tokens = loaded.max_model_len,
                                      .window_bytes = plan_.window_bytes,
                                      .make_lane = plan_.make_lane,
                                      .needs_lane = plan_.needs_lane};
  auto server = TransferServer::create(
      options, [engine = loaded.engine.get()](std::shared_ptr<PieceReceiver> receiver) {
        return std::make_shared<LocalPrefill>(*engine, std::move(receiver));
      });
  if (!server) return with_context("--transfer-addr: ", server.error());
  server_ = std::move(*server);
  log_info("prompts of decode servers are taken at {}", to_string(server_->endpoint()));
  return {};
}

std::optional<SitesOptions> Separated::sites() const {
  if (!plan_.has_sites()) return std::nullopt;
  return SitesOptions{.prefill_lanes = plan_.prefill_lanes,
                      .decode_lanes = plan_.decode_lanes,
                      .window_bytes = plan_.window_bytes,
                      .with_digests = plan_.digests};
}

TransferPort Separated::port() const {
  if (!server_) return {};
  const Endpoint& endpoint = server_->endpoint();
  return {.engine_id = engine_id_text(engine_),
          .host = endpoint.host,
          .port = static_cast<int>(endpoint.port),
          .tp_size = model_.placement().tp,
          .page_tokens = kPageSize,
          .prefills_only = plan_.role == TransferRole::kPrefill};
}

void Separated::write_metrics(std::string_view labels, const EngineStats& engine,
                              std::string& out) const {
  if (peers_ || engine.roles) write_orders(labels, engine.prefill, out);
  if (peers_) write_peers(labels, peers_->stats(), out);
  if (engine.roles) write_roles(labels, engine, out);
  if (server_) write_server(labels, server_->stats(), out);
}

}  // namespace fathom
