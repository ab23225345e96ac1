// Converts a request body to engine requests and the writer of its response. This is the interface
// for transports. Pure functions; any thread may call.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/grammar_spec.h"
#include "engine/request.h"
#include "server/openai/api_error.h"
#include "server/openai/chat_request.h"
#include "server/openai/completion_request.h"
#include "server/openai/generate_request.h"
#include "server/openai/messages_request.h"
#include "server/openai/reply_writer.h"
#include "server/openai/responses_request.h"
#include "server/openai/schema.h"
#include "server/openai/served_model.h"

namespace fathom {

// requests[p] belongs to prompt p: its events go to writer->push(p, …).
struct Generation {
  std::vector<Request> requests;
  std::optional<GrammarSpec> grammar;  // applies to every choice
  std::string grammar_param;           // field that asks for the grammar; param of its error
  std::string cache_salt;
  int64_t priority = 0;
  std::optional<int64_t> speculation = {};
  bool is_prompt_only = false;  // for a server that decodes
  std::unique_ptr<ReplyWriter> writer;
  std::vector<std::string> unknown_fields;  // accepted, listed for the log; at most 32 paths
};

enum class GeneratingEndpoint { kChat, kCompletions, kMessages, kResponses, kGenerate };

// Returns the error shape of an endpoint.
ErrorShape error_shape_of(GeneratingEndpoint endpoint);

// Parses, checks, renders and tokenizes; afterwards only the engine can refuse. `served` must
// outlive the writer.
ApiResult<Generation> prepare(GeneratingEndpoint endpoint, std::string_view body,
                              const ServedModel& served, const RequestLimits& limits,
                              const ReplyIdentity& identity);

// Prepare requests that are already parsed and checked.
ApiResult<Generation> prepare_chat(ChatRequest request, const ServedModel& served,
                                   const ReplyIdentity& identity);
ApiResult<Generation> prepare_completion(CompletionRequest request, const ServedModel& served,
                                         const ReplyIdentity& identity);
ApiResult<Generation> prepare_messages(const MessagesRequest& request, const ServedModel& served,
                                       const ReplyIdentity& identity);
ApiResult<Generation> prepare_responses(const ResponsesRequest& request, const ServedModel& served,
                                        const ReplyIdentity& identity);
ApiResult<Generation> prepare_generate(GenerateRequest request, const ServedModel& served,
                                       const ReplyIdentity& identity);

}  // namespace fathom
