#include "server/api/abort_request.h"

#include "server/openai/request_json.h"

namespace fathom {

const ObjectSchema& AbortRequest::schema() {
  using F = AbortRequest;
  static const ObjectSchema kSchema =
      SchemaOf<F>("AbortRequest")
          .field("rid", &F::rid, string(1, 256), "Of a request's X-Request-Id or of its answer")
          .field("abort_all", &F::abort_all, boolean(), "All requests; goes before rid")
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
