#include "server/openai/transfer_fields.h"

#include <algorithm>
#include <limits>

#include "base/math.h"
#include "server/openai/generation.h"
#include "server/openai/json_writer.h"

namespace fathom {

const ObjectSchema& KvTransferParams::schema() {
  using F = KvTransferParams;
  static const ObjectSchema kSchema =
      SchemaOf<F>("KvTransferParams")
          .field("do_remote_decode", &F::do_remote_decode, boolean(),
                 "Compute the prompt for another server, which decodes")
          .field("do_remote_prefill", &F::do_remote_prefill, boolean(),
                 "The prompt is computed by the server remote_engine_id")
          .field("remote_engine_id", &F::remote_engine_id, string(0, 256),
                 "As the reply of that server has it")
          .checked("remote_block_ids", any_type(), "Accepted, has no effect")
          .checked("remote_host", any_type(), "Accepted, has no effect")
          .checked("remote_port", any_type(), "Accepted, has no effect")
          .checked("remote_request_id", any_type(), "Accepted, has no effect")
          .checked("tp_size", any_type(), "Accepted, has no effect")
          .build();
  return kSchema;
}

const ObjectSchema& TransferFields::schema() {
  using F = TransferFields;
  static const ObjectSchema kSchema =
      SchemaOf<F>("Transfer")
          .field("kv_transfer_params", &F::kv_transfer_params,
                 object_of(KvTransferParams::schema()),
                 "vLLM's: the prompt and the answer are computed by two servers")
          .field("bootstrap_host", &F::bootstrap_host, string(0, 256),
                 "SGLang's: host of the prefill server's --transfer-addr")
          .field("bootstrap_port", &F::bootstrap_port, integer(0, 65'535), "Its port")
          .field("bootstrap_room", &F::bootstrap_room,
                 integer(0, std::numeric_limits<int64_t>::max()),
                 "SGLang's: the request also goes to the other of the two servers")
          .build();
  return kSchema;
}

ApiResult<Handoff> handoff_of(const TransferFields& fields, const ServedModel& served,
                              std::optional<int64_t> max_tokens, bool streams, size_t num_prompts) {
  const KvTransferParams& params = fields.kv_transfer_params;
  const TransferPort& port = served.transfer;
  constexpr auto kDecodeThere = "kv_transfer_params.do_remote_decode";
  Handoff handoff;
  if (params.do_remote_decode) {
    if (params.do_remote_prefill) {
      return bad_field(kDecodeThere, "{} and do_remote_prefill are both true, expected one",
                       kDecodeThere);
    }
    if (port.engine_id.empty()) {
      return bad_field(kDecodeThere,
                       "{} is true, but this server was started without --transfer-addr",
                       kDecodeThere);
    }
    if (max_tokens != 1) {
      return bad_field("max_tokens", "max_tokens is {}, must be 1 where {} is true",
                       max_tokens ? std::to_string(*max_tokens) : "absent", kDecodeThere);
    }
    if (streams) {
      return bad_field("stream", "stream is true, must be false where {} is true", kDecodeThere);
    }
    if (num_prompts != 1) {
      return bad_field("prompt", "prompt has {} prompts, must be one where {} is true", num_prompts,
                       kDecodeThere);
    }
    handoff.is_prompt_only = handoff.is_reported = true;
  } else if (params.do_remote_prefill) {
    handoff.prefill_at = params.remote_engine_id;
  } else if (fields.bootstrap_room && port.prefills_only) {
    handoff.is_prompt_only = true;
  } else if (!fields.bootstrap_host.empty() && fields.bootstrap_port) {
    handoff.prefill_at = fmt::format("{}:{}", fields.bootstrap_host, *fields.bootstrap_port);
  }
  return handoff;
}

void apply_handoff(const Handoff& handoff, SamplingParams& params) {
  if (!handoff.is_prompt_only) return;
  params.max_tokens = 1;
  params.min_tokens = std::min<int64_t>(params.min_tokens, 1);
}

void set_handoff(const Handoff& handoff, Generation& generation) {
  generation.is_prompt_only = handoff.is_prompt_only;
  for (Request& request : generation.requests) request.prefill_at = handoff.prefill_at;
}

std::string kv_transfer_params_json(const ServedModel& served, int64_t prompt_tokens) {
  std::string out;
  JsonWriter json(out);
  json.open('{').field("do_remote_prefill", true).field("do_remote_decode", false);
  json.key("remote_block_ids").open('[');
  for (int64_t page = 0; page < ceil_div(prompt_tokens, served.transfer.page_tokens); ++page)
    json.value(page);
  json.close(']').field("remote_engine_id", served.transfer.engine_id);
  json.field("remote_host", served.transfer.host).field("remote_port", served.transfer.port);
  json.field("tp_size", served.transfer.tp_size).close('}');
  return out;
}

}  // namespace fathom
