#include "server/api/abort_request.h"

#include "server/openai/request_json.h"

namespace fathom {

const ObjectSchema& AbortRequest::schema() {
  using F = AbortRequest;
  static const ObjectSchema kSchema =
      SchemaOf<F>("AbortRequest")
          .field("rid", &F::rid, string(1, 256),
                 "A request's X-Request-Id, or the id in its response")
          .field("abort_all", &F::abort_all, boolean(), "Abort all requests; rid is then ignored")
          .build();
  return kSchema;
}

ApiResult<std::string> read_abort_target(std::string_view body, const RequestLimits& limits) {
  FATHOM_TRY(const json::object object, parse_request_json(body));
  std::vector<std::string> unknown;
  FATHOM_TRY(AbortRequest request, read_request<AbortRequest>(object, limits, &unknown));
  if (request.abort_all) return std::string();
  if (request.rid.empty()) {
    return bad_field("rid", "rid must be the id of a request, or abort_all true");
  }
  return std::move(request.rid);
}

}  // namespace fathom
