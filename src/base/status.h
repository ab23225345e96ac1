// Errors that a user, a file or the network can cause: a code and one sentence.
//
// The sentence names the field (or tensor, or flag), its value and the limit that it broke. Codes
// map one to one to HTTP statuses. A bug in this program is not a Status but a FATHOM_CHECK
// (base/check.h).
#pragma once

#include <fmt/format.h>

#include <string>
#include <tl/expected.hpp>
#include <utility>

namespace fathom {

enum class Code {
  kInvalidArgument,    // 400
  kUnauthenticated,    // 401
  kNotFound,           // 404
  kDeadlineExceeded,   // 408
  kTooLarge,           // 413
  kResourceExhausted,  // 429
  kInternal,           // 500
  kUnavailable,        // 503
};

// The HTTP status of a code.
int http_status(Code code);

struct Status {
  Code code = Code::kInternal;
  std::string message;
};

// A value, or the Status that explains its absence. Result<> is for functions that return nothing.
template <typename T = void>
using Result = tl::expected<T, Status>;

template <typename... Args>
tl::unexpected<Status> error(Code code, fmt::format_string<Args...> format, Args&&... args) {
  return tl::unexpected<Status>(Status{code, fmt::format(format, std::forward<Args>(args)...)});
}

template <typename... Args>
tl::unexpected<Status> invalid(fmt::format_string<Args...> format, Args&&... args) {
  return error(Code::kInvalidArgument, format, std::forward<Args>(args)...);
}

template <typename... Args>
tl::unexpected<Status> not_found(fmt::format_string<Args...> format, Args&&... args) {
  return error(Code::kNotFound, format, std::forward<Args>(args)...);
}

// The same error with a prefix: "config.json: " + the message.
tl::unexpected<Status> with_context(std::string_view context, const Status& status);

}  // namespace fathom

#define FATHOM_CONCAT_INNER(a, b) a##b
#define FATHOM_CONCAT(a, b) FATHOM_CONCAT_INNER(a, b)

// FATHOM_TRY(auto x, f()) declares x with f()'s value, or returns f()'s error (a Status, or what
// the enclosing function's error type converts it to).
// NOLINTBEGIN(bugprone-macro-parentheses): a declaration cannot stand in parentheses.
#define FATHOM_TRY(declaration, expression)                          \
  auto FATHOM_CONCAT(result_, __LINE__) = (expression);              \
  if (!FATHOM_CONCAT(result_, __LINE__))                             \
    return tl::unexpected(FATHOM_CONCAT(result_, __LINE__).error()); \
  declaration = std::move(*FATHOM_CONCAT(result_, __LINE__))
// NOLINTEND(bugprone-macro-parentheses)

// FATHOM_RETURN_IF_ERROR(f()) returns f()'s error from the enclosing function.
#define FATHOM_RETURN_IF_ERROR(expression)                                             \
  do {                                                                                 \
    if (auto result_ = (expression); !result_) return tl::unexpected(result_.error()); \
  } while (false)
