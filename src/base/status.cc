#include "base/status.h"

namespace fathom {

int http_status(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return 400;
    case Code::kUnauthenticated:
      return 401;
    case Code::kNotFound:
      return 404;
    case Code::kDeadlineExceeded:
      return 408;
    case Code::kTooLarge:
      return 413;
    case Code::kResourceExhausted:
      return 429;
    case Code::kInternal:
      return 500;
    case Code::kUnavailable:
      return 503;
  }
  return 500;
}

tl::unexpected<Status> with_context(std::string_view context, const Status& status) {
  return tl::unexpected<Status>(Status{status.code, fmt::format("{}{}", context, status.message)});
}

}  // namespace fathom
