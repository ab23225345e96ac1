// Bodies of the endpoints that generate nothing: models, tokenize, count_tokens, version.
#pragma once

#include <string>
#include <string_view>

#include "server/openai/api_error.h"
#include "server/openai/schema.h"
#include "server/openai/served_model.h"

namespace fathom {

// GET /v1/models, all models or one. Anthropic's shape is for clients that send the header
// anthropic-version. An unknown name is a 404 with the code "model_not_found".
std::string models_body(const ServedModel& served, ErrorShape shape = ErrorShape::kOpenAi);
ApiResult<std::string> model_body(const ServedModel& served, std::string_view name,
                                  ErrorShape shape = ErrorShape::kOpenAi);

std::string version_body(const ServedModel& served);         // GET /version
std::string get_model_info_body(const ServedModel& served);  // GET /get_model_info
// GET /props in llama-server's form: context, defaults, names.
std::string props_body(const ServedModel& served);
// GET /server_info: the model and the server's state, `server`.
std::string server_info_body(const ServedModel& served, const json::object& server);

// POST /tokenize: {"count","max_model_len","tokens","token_strs"}.
ApiResult<std::string> tokenize_body(std::string_view body, const ServedModel& served,
                                     const RequestLimits& limits);
// POST /apply-template in llama-server's form: {"prompt"}, the conversation in the chat format.
ApiResult<std::string> apply_template_body(std::string_view body, const ServedModel& served,
                                           const RequestLimits& limits);
// POST /detokenize: {"prompt"}.
ApiResult<std::string> detokenize_body(std::string_view body, const ServedModel& served,
                                       const RequestLimits& limits);
// POST /v1/messages/count_tokens: {"input_tokens"}.
ApiResult<std::string> count_tokens_body(std::string_view body, const ServedModel& served,
                                         const RequestLimits& limits);

}  // namespace fathom
