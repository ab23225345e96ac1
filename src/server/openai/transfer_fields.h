// The fields with which proxies of other engines send a request to two servers, one that computes
// its prompt and one that decodes: vLLM's kv_transfer_params, SGLang's bootstrap fields.
//
// They say which server computes the prompt, no more: the decoding one orders it there and checks
// what comes (docs/separation.md), so that fields that are wrong or old cost time and change no
// token.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/request.h"
#include "server/openai/schema.h"
#include "server/openai/served_model.h"

namespace fathom {

struct Generation;

struct KvTransferParams {
  bool do_remote_decode = false, do_remote_prefill = false;
  std::string remote_engine_id;

  static const ObjectSchema& schema();
};

struct TransferFields {
  KvTransferParams kv_transfer_params;
  std::string bootstrap_host;
  std::optional<int64_t> bootstrap_port, bootstrap_room;

  static const ObjectSchema& schema();
};

// What a request's transfer fields ask of this server.
struct Handoff {
  bool is_prompt_only = false;  // another server decodes: one token is enough
  bool is_reported = false;     // the reply has kv_transfer_params
  std::string prefill_at;       // as Request has it
};

// The handoff of a request for `max_tokens`, streamed or not, with this many prompts.
ApiResult<Handoff> handoff_of(const TransferFields& fields, const ServedModel& served,
                              std::optional<int64_t> max_tokens, bool streams, size_t num_prompts);

// Cuts what another server will decode.
void apply_handoff(const Handoff& handoff, SamplingParams& params);
// Says so in the requests of all prompts.
void set_handoff(const Handoff& handoff, Generation& generation);

// The reply's kv_transfer_params, as JSON: what the decoding server gets. Its remote_block_ids
// count the pages of the prompt.
std::string kv_transfer_params_json(const ServedModel& served, int64_t prompt_tokens);

}  // namespace fathom
