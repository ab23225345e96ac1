// From a request's body to what the engine runs and the writer of its answer: the whole of the wire
// that a transport needs. Pure functions; any thread.
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

// requests[p] is that of prompt p: its events go to writer->push(p, …).
struct Generation {
  std::vector<Request> requests;
  std::optional<GrammarSpec> grammar;  // of every choice
  std::string grammar_param;           // the field that asks for it, to blame where it is wrong
  std::string cache_salt;
  int64_t priority = 0;
  std::unique_ptr<ReplyWriter> writer;
  std::vector<std::string> unknown_fields;  // accepted, for the log; at most 32 paths
};

enum class GeneratingEndpoint { kChat, kCompletions, kMessages, kResponses, kGenerate };

// The shape of an endpoint's errors.
ErrorShape error_shape_of(GeneratingEndpoint endpoint);

// Parses, checks, renders, tokenizes: afterwards only the engine can refuse. `served` must outlive
// the writer.
ApiResult<Generation> prepare(GeneratingEndpoint endpoint, std::string_view body,
                              const ServedModel& served, const RequestLimits& limits,
                              const ReplyIdentity& identity);

// The same from requests that have been read.
ApiResult<Generation> prepare_chat(ChatRequest request, const ServedModel& served,
                                   const ReplyIdentity& identity);
ApiResult<Generation> prepare_completion(CompletionRequest request, const ServedModel& served,
                                         const ReplyIdentity& identity);
ApiResult<Generation> prepare_messages(MessagesRequest request, const ServedModel& served,
                                       const ReplyIdentity& identity);
ApiResult<Generation> prepare_responses(ResponsesRequest request, const ServedModel& served,
                                        const ReplyIdentity& identity);
ApiResult<Generation> prepare_generate(GenerateRequest request, const ServedModel& served,
                                       const ReplyIdentity& identity);

}  // namespace fathom
