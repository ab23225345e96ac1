#include "server/openai/generate_request.h"

namespace fathom {
const ObjectSchema& GenerateSampling::schema() {
  using F = GenerateSampling;
  static const ObjectSchema kSchema =
      SchemaOf<F>("GenerateSampling")
          .field("max_new_tokens", &F::max_new_tokens, integer(1, kMaxInt32),
                 "Longest answer in tokens")
          .field("min_new_tokens", &F::min_new_tokens, integer(0, kMaxInt32),
                 "Shortest answer in tokens")
          .field("n", &F::n, integer_up_to(1, &RequestLimits::max_choices), "Independent answers")
          .field("stop", &F::stop,
                 one_of({string(1, kMaxStopBytes),
                         array_of(string(1, kMaxStopBytes), 0, kMaxStopStrings)}),
                 "The answer ends before any of these")
          .field("json_schema", &F::json_schema, string(1, kMaxGrammarBytes),
                 "The answer follows this schema")
          .field("regex", &F::regex, string(1, kMaxGrammarBytes),
                 "The answer matches this expression")
          .field("ebnf", &F::ebnf, string(1, kMaxGrammarBytes), "The answer follows this grammar")
          .include(&F::sampling)
          .build();
  return kSchema;
}

const ObjectSchema& GenerateRequest::schema() {
  using F = GenerateRequest;
  const Type id = integer(0, kMaxInt32);
  static const ObjectSchema kSchema =
      SchemaOf<F>("GenerateRequest")
          .field("text", &F::text, one_of({string(), array_of(string(), 1, kMaxPrompts)}),
                 "One prompt or several; or input_ids")
          .field("input_ids", &F::input_ids, array_of(one_of({id, array_of(id, 1)}), 1),
                 "The ids of one prompt or of several")
          .field("sampling_params", &F::sampling_params, object_of(GenerateSampling::schema()),
                 "How tokens are chosen")
          .field("stream", &F::stream, boolean(), "Answer with server-sent events")
          .field("return_logprob", &F::return_logprob, boolean(), "Report log-probabilities")
          .field("top_logprobs_num", &F::top_logprobs_num, integer(0, kMaxTopLogprobs),
                 "Alternatives for each token")
          .field("logprob_start_len", &F::logprob_start_len, integer(-1, kMaxInt32),
                 "First prompt token with log-probabilities; -1: none of the prompt")
          .field("rid", &F::rid, name_string(), "The request's id")
          .field("lora_path", &F::lora_path, any_type(), "Not supported")
          .include(&F::transfer)
          .build();
  return kSchema;
}

}  // namespace fathom
