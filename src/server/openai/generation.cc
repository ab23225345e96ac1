#include "server/openai/generation.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "server/openai/prompt_encoding.h"
#include "server/openai/request_json.h"

namespace fathom {
namespace {

template <typename T>
ApiResult<Generation> prepare_as(const json::object& body, const ServedModel& served,
                                 const RequestLimits& limits, const ReplyIdentity& identity,
                                 ApiResult<Generation> (*prepare_one)(T, const ServedModel&,
                                                                      const ReplyIdentity&)) {
  std::vector<std::string> unknown;
  using Body = std::remove_cvref_t<T>;
  FATHOM_TRY(Body request, read_request<Body>(body, limits, &unknown));
  FATHOM_TRY(Generation generation, prepare_one(std::forward<T>(request), served, identity));
  generation.unknown_fields = std::move(unknown);
  if (generation.priority == 0 || limits.allow_priority) return generation;
  if (limits.refuse_unknown) {
    return tl::unexpected(
        ApiError(400,
                 fmt::format("priority is {}, but this server was started without "
                             "--enable-priority",
                             generation.priority),
                 "priority", "unsupported_parameter"));
  }
  generation.priority = 0;
  generation.unknown_fields.push_back("priority");
  return generation;
}

}  // namespace

ErrorShape error_shape_of(GeneratingEndpoint endpoint) {
  return endpoint == GeneratingEndpoint::kMessages ? ErrorShape::kAnthropic : ErrorShape::kOpenAi;
}

ApiResult<Generation> prepare(GeneratingEndpoint endpoint, std::string_view body,
                              const ServedModel& served, const RequestLimits& limits,
                              const ReplyIdentity& identity) {
  const size_t max_string_bytes = std::max(max_prompt_bytes(served), kMaxFreeStringBytes);
  FATHOM_TRY(const json::object object, parse_request_json(body, max_string_bytes));
  switch (endpoint) {
    case GeneratingEndpoint::kChat:
      return prepare_as(object, served, limits, identity, &prepare_chat);
    case GeneratingEndpoint::kCompletions:
      return prepare_as(object, served, limits, identity, &prepare_completion);
    case GeneratingEndpoint::kMessages:
      return prepare_as(object, served, limits, identity, &prepare_messages);
    case GeneratingEndpoint::kResponses:
      return prepare_as(object, served, limits, identity, &prepare_responses);
    case GeneratingEndpoint::kGenerate:
      return prepare_as(object, served, limits, identity, &prepare_generate);
  }
  return tl::unexpected(ApiError(404, "there is no such endpoint"));
}

}  // namespace fathom
