#include "server/api/error_response.h"

namespace fathom {

http::Response error_response(const ApiError& error, ErrorShape shape) {
  http::Response response;
  response.status = error.status;
  response.body = error.to_json(shape);
  if (error.status == 429 || error.status == 503) {
    response.headers.add("Retry-After", "1");
  } else if (error.status >= 500) {
    response.headers.add("x-should-retry", "false");
  }
  return response;
}

}  // namespace fathom
