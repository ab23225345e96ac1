#include "server/openai/reply_schemas.h"

#include "base/check.h"

namespace fathom {
namespace {

constexpr std::string_view kErrors = R"json({
"Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "object",
  "required": ["message", "type", "param", "code"], "properties": {
    "message": {"type": "string", "description": "One sentence that says what is wrong"},
    "type": {"enum": ["invalid_request_error", "authentication_error", "permission_error",
                      "not_found_error", "rate_limit_error", "server_error", "unavailable_error"]},
    "param": {"type": ["string", "null"], "description": "The field: messages[0].content"},
    "code": {"type": ["string", "null"]}}}}},
"AnthropicError": {"type": "object", "required": ["type", "error"], "properties": {
  "type": {"const": "error"},
  "error": {"type": "object", "required": ["type", "message"], "properties": {
    "type": {"enum": ["invalid_request_error", "authentication_error", "permission_error",
                      "not_found_error", "request_too_large", "rate_limit_error", "api_error",
                      "overloaded_error"]},
    "message": {"type": "string"}}}}}
})json";

constexpr std::string_view kParts = R"json({
"TokenIds": {"type": "array", "items": {"type": "integer", "minimum": 0}},
"Stop": {"type": ["string", "integer", "null"], "description": "The string or token that ended it"},
"Usage": {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
  "properties": {
    "prompt_tokens": {"type": "integer", "minimum": 0},
    "completion_tokens": {"type": "integer", "minimum": 0},
    "total_tokens": {"type": "integer", "minimum": 0},
    "prompt_tokens_details": {"type": "object", "required": ["cached_tokens"],
      "properties": {"cached_tokens": {"type": "integer", "minimum": 0}}},
    "completion_tokens_details": {"type": "object", "required": ["reasoning_tokens"],
      "properties": {"reasoning_tokens": {"type": "integer", "minimum": 0},
        "accepted_tokens": {"type": "integer", "minimum": 0,
          "description": "Drafts of the MTP layer that are in the answer"}}}}},
"TokenLogprob": {"type": "object", "required": ["token", "logprob", "bytes"], "properties": {
  "token": {"type": "string"}, "logprob": {"type": "number"},
  "bytes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}},
  "top_logprobs": {"type": "array", "items": {"$ref": "#/components/schemas/TokenLogprob"}}}},
"PromptLogprobs": {"type": "array", "items": {"type": ["object", "null"],
  "additionalProperties": {"type": "object", "required": ["logprob", "rank", "decoded_token"],
    "properties": {"logprob": {"type": "number"}, "rank": {"type": ["integer", "null"]},
                   "decoded_token": {"type": "string"}}}}},
"KvTransferReply": {"type": "object", "required": ["do_remote_prefill", "remote_engine_id"],
  "properties": {"do_remote_prefill": {"const": true}, "do_remote_decode": {"const": false},
    "remote_engine_id": {"type": "string"}, "remote_host": {"type": "string"},
    "remote_port": {"type": "integer"}, "tp_size": {"type": "integer", "minimum": 1},
    "remote_block_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}}}},
"Model": {"type": "object", "required": ["id", "object", "created", "owned_by", "max_model_len"],
  "properties": {"id": {"type": "string"}, "object": {"const": "model"},
    "created": {"type": "integer"}, "owned_by": {"type": "string"}, "root": {"type": "string"},
    "parent": {"type": "null"}, "max_model_len": {"type": "integer", "minimum": 1}}}
})json";

constexpr std::string_view kGenerated = R"json({
"ChatCompletion": {"type": "object",
  "required": ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"],
  "properties": {"id": {"type": "string"}, "object": {"const": "chat.completion"},
    "created": {"type": "integer"}, "model": {"type": "string"},
    "system_fingerprint": {"type": "string"},
    "choices": {"type": "array", "minItems": 1, "items": {"type": "object",
      "required": ["index", "message", "logprobs", "finish_reason", "matched_stop", "stop_reason"],
      "properties": {"index": {"type": "integer", "minimum": 0},
        "message": {"type": "object", "required": ["role", "content", "refusal"], "properties": {
          "role": {"const": "assistant"}, "content": {"type": ["string", "null"]},
          "refusal": {"type": "null"}, "reasoning_content": {"type": "string"},
          "tool_calls": {"type": "array", "minItems": 1, "items": {"type": "object",
            "required": ["id", "type", "function"], "properties": {"id": {"type": "string"},
              "type": {"const": "function"}, "function": {"type": "object",
                "required": ["name", "arguments"], "properties": {"name": {"type": "string"},
                  "arguments": {"type": "string", "description": "JSON text"}}}}}}}},
        "logprobs": {"type": ["object", "null"], "required": ["content"], "properties": {
          "content": {"type": "array", "items": {"$ref": "#/components/schemas/TokenLogprob"}}}},
        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
        "matched_stop": {"$ref": "#/components/schemas/Stop"},
        "stop_reason": {"$ref": "#/components/schemas/Stop"},
        "token_ids": {"$ref": "#/components/schemas/TokenIds"}}}},
    "usage": {"$ref": "#/components/schemas/Usage"},
    "prompt_logprobs": {"$ref": "#/components/schemas/PromptLogprobs"},
    "prompt_token_ids": {"$ref": "#/components/schemas/TokenIds"},
    "kv_transfer_params": {"$ref": "#/components/schemas/KvTransferReply"}}},
"Completion": {"type": "object",
  "required": ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"],
  "properties": {"id": {"type": "string"}, "object": {"const": "text_completion"},
    "created": {"type": "integer"}, "model": {"type": "string"},
    "system_fingerprint": {"type": "string"},
    "choices": {"type": "array", "minItems": 1, "items": {"type": "object",
      "required": ["index", "text", "logprobs", "finish_reason", "matched_stop", "stop_reason"],
      "properties": {"index": {"type": "integer", "minimum": 0}, "text": {"type": "string"},
        "logprobs": {"type": ["object", "null"],
          "required": ["tokens", "token_logprobs", "top_logprobs", "text_offset"], "properties": {
            "tokens": {"type": "array", "items": {"type": "string"}},
            "token_logprobs": {"type": "array", "items": {"type": ["number", "null"]}},
            "top_logprobs": {"type": "array", "items": {"type": ["object", "null"],
              "additionalProperties": {"type": "number"}}},
            "text_offset": {"type": "array", "items": {"type": "integer", "minimum": 0}}}},
        "finish_reason": {"enum": ["stop", "length"]},
        "matched_stop": {"$ref": "#/components/schemas/Stop"},
        "stop_reason": {"$ref": "#/components/schemas/Stop"},
        "prompt_logprobs": {"$ref": "#/components/schemas/PromptLogprobs"},
        "prompt_token_ids": {"$ref": "#/components/schemas/TokenIds"},
        "token_ids": {"$ref": "#/components/schemas/TokenIds"}}}},
    "usage": {"$ref": "#/components/schemas/Usage"},
    "kv_transfer_params": {"$ref": "#/components/schemas/KvTransferReply"}}},
"AnthropicMessage": {"type": "object",
  "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
  "properties": {"id": {"type": "string"}, "type": {"const": "message"},
    "role": {"const": "assistant"}, "model": {"type": "string"},
    "content": {"type": "array", "items": {"anyOf": [
      {"type": "object", "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}}},
      {"type": "object", "required": ["type", "thinking", "signature"],
        "properties": {"type": {"const": "thinking"}, "thinking": {"type": "string"},
                       "signature": {"type": "string"}}},
      {"type": "object", "required": ["type", "id", "name", "input"],
        "properties": {"type": {"const": "tool_use"}, "id": {"type": "string"},
                       "name": {"type": "string"}, "input": {"type": "object"}}}]}},
    "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
    "stop_sequence": {"type": ["string", "null"]},
    "usage": {"type": "object", "required": ["input_tokens", "output_tokens"], "properties": {
      "input_tokens": {"type": "integer", "minimum": 0},
      "cache_creation_input_tokens": {"type": "integer", "minimum": 0},
      "cache_read_input_tokens": {"type": "integer", "minimum": 0},
      "output_tokens": {"type": "integer", "minimum": 0},
      "accepted_tokens": {"type": "integer", "minimum": 0,
        "description": "Drafts of the MTP layer that are in the answer"}}}}},
"Response": {"type": "object",
  "required": ["id", "object", "created_at", "status", "error", "incomplete_details", "model",
    "output", "usage", "instructions", "max_output_tokens", "parallel_tool_calls", "temperature",
    "top_p", "tool_choice", "tools", "text", "metadata"],
  "properties": {"id": {"type": "string"}, "object": {"const": "response"},
    "created_at": {"type": "integer"}, "status": {"enum": ["completed", "incomplete"]},
    "background": {"const": false}, "store": {"const": false}, "error": {"type": "null"},
    "incomplete_details": {"type": ["object", "null"],
      "properties": {"reason": {"const": "max_output_tokens"}}},
    "model": {"type": "string"}, "previous_response_id": {"type": "null"},
    "output": {"type": "array", "items": {"type": "object", "required": ["id", "type", "status"],
      "properties": {"id": {"type": "string"},
        "type": {"enum": ["message", "reasoning", "function_call"]},
        "role": {"const": "assistant"}, "status": {"enum": ["completed", "incomplete"]},
        "summary": {"type": "array"},
        "content": {"type": "array", "items": {"type": "object", "required": ["type", "text"],
          "properties": {"type": {"enum": ["output_text", "reasoning_text"]},
            "text": {"type": "string"}, "annotations": {"type": "array"},
            "logprobs": {"type": "array",
                         "items": {"$ref": "#/components/schemas/TokenLogprob"}}}}},
        "call_id": {"type": "string"}, "name": {"type": "string"},
        "arguments": {"type": "string"}}}},
    "instructions": {"type": ["string", "null"]},
    "max_output_tokens": {"type": ["integer", "null"]},
    "parallel_tool_calls": {"type": "boolean"}, "temperature": {"type": "number"},
    "top_p": {"type": "number"}, "tool_choice": {"type": ["string", "object"]},
    "tools": {"type": "array"}, "text": {"type": "object", "required": ["format"]},
    "reasoning": {"type": "object"}, "truncation": {"type": "string"},
    "metadata": {"type": "object"},
    "usage": {"type": "object", "required": ["input_tokens", "output_tokens", "total_tokens"],
      "properties": {"input_tokens": {"type": "integer", "minimum": 0},
        "output_tokens": {"type": "integer", "minimum": 0},
        "total_tokens": {"type": "integer", "minimum": 0},
        "input_tokens_details": {"type": "object"},
        "output_tokens_details": {"type": "object", "required": ["reasoning_tokens"],
          "properties": {"reasoning_tokens": {"type": "integer", "minimum": 0},
            "accepted_tokens": {"type": "integer", "minimum": 0,
              "description": "Drafts of the MTP layer that are in the answer"}}}}}}},
"Generated": {"type": "object", "required": ["text", "output_ids", "meta_info"], "properties": {
  "text": {"type": "string"}, "output_ids": {"$ref": "#/components/schemas/TokenIds"},
  "index": {"type": "integer", "minimum": 0},
  "meta_info": {"type": "object",
    "required": ["id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens"],
    "properties": {"id": {"type": "string"},
      "finish_reason": {"type": "object", "required": ["type"], "properties": {
        "type": {"enum": ["stop", "length"]}, "length": {"type": "integer"},
        "matched": {"$ref": "#/components/schemas/Stop"}}},
      "prompt_tokens": {"type": "integer", "minimum": 1},
      "completion_tokens": {"type": "integer", "minimum": 0},
      "cached_tokens": {"type": "integer", "minimum": 0}, "e2e_latency": {"type": "number"},
      "input_token_logprobs": {"$ref": "#/components/schemas/LogprobTriples"},
      "output_token_logprobs": {"$ref": "#/components/schemas/LogprobTriples"},
      "input_top_logprobs": {"type": "array", "items": {"anyOf": [{"type": "null"},
        {"$ref": "#/components/schemas/LogprobTriples"}]}},
      "output_top_logprobs": {"type": "array",
        "items": {"$ref": "#/components/schemas/LogprobTriples"}}}}}},
"LogprobTriples": {"type": "array", "items": {"type": "array", "minItems": 3, "maxItems": 3,
  "prefixItems": [{"type": ["number", "null"]}, {"type": "integer"}, {"type": "null"}]}},
"GenerateReply": {"anyOf": [{"$ref": "#/components/schemas/Generated"},
  {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Generated"}}]}
})json";

constexpr std::string_view kOthers = R"json({
"Models": {"type": "object", "required": ["object", "data"], "properties": {
  "object": {"const": "list"},
  "data": {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Model"}}}},
"Load": {"type": "object", "required": ["server_load"],
  "properties": {"server_load": {"type": "integer", "minimum": 0}}},
"TokenCount": {"type": "object", "required": ["input_tokens"],
  "properties": {"input_tokens": {"type": "integer", "minimum": 1}}},
"Tokens": {"type": "object", "required": ["count", "max_model_len", "tokens", "token_strs"],
  "properties": {"count": {"type": "integer", "minimum": 0},
    "max_model_len": {"type": "integer", "minimum": 1},
    "tokens": {"$ref": "#/components/schemas/TokenIds"},
    "token_strs": {"type": ["array", "null"], "items": {"type": "string"}}}},
"Text": {"type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
"Version": {"type": "object", "required": ["version"],
  "properties": {"version": {"type": "string"}}},
"ModelInfo": {"type": "object",
  "required": ["model_path", "is_generation", "served_model_name", "max_model_len", "vocab_size"],
  "properties": {"model_path": {"type": "string"}, "tokenizer_path": {"type": "string"},
    "is_generation": {"const": true}, "served_model_name": {"type": "string"},
    "max_model_len": {"type": "integer"}, "vocab_size": {"type": "integer"},
    "chat_format": {"type": ["string", "null"]}}},
"ServerInfo": {"type": "object", "required": ["version", "model"], "properties": {
  "version": {"type": "string"}, "model": {"$ref": "#/components/schemas/ModelInfo"}}},
"Properties": {"type": "object",
  "required": ["default_generation_settings", "model_alias", "model_path", "build_info"],
  "properties": {
    "default_generation_settings": {"type": "object", "required": ["n_ctx", "params"],
      "properties": {"n_ctx": {"type": "integer", "minimum": 1}, "params": {"type": "object"}}},
    "model_alias": {"type": "string"}, "model_path": {"type": "string"},
    "build_info": {"type": "string"}}}
})json";

}  // namespace

const json::object& reply_schemas() {
  static const json::object kSchemas = [] {
    json::object all;
    for (const std::string_view text : {kErrors, kParts, kGenerated, kOthers}) {
      const auto parsed = parse_json(text, "reply_schemas");
      FATHOM_CHECK(parsed && parsed->is_object(), "a reply schema is not JSON");
      for (const auto& [name, schema] : parsed->get_object()) all[name] = schema;
    }
    return all;
  }();
  return kSchemas;
}

}  // namespace fathom
