// Errors that a user, a file or the network can cause: a code and one sentence.
//
// The sentence names the field (or tensor, or flag), the value it had and the limit it broke. Codes
// map one to one to HTTP statuses, so that a server never has to guess. A mistake of our own is not
// a Status: it is a FATHOM_CHECK (base/check.h).
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

// The HTTP status that a code stands for.
int http_status(Code code);

struct Status {
  Code code = Code::kInternal;
  std::string message;
};

// A value, or the Status that says why there is none. Result<> is for calls that return nothing.
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

// The same error with a sentence's beginning put before it: "config.json: " + what was wrong.
tl::unexpected<Status> with_context(std::string_view context, const Status& status);

}  // namespace fathom

#define FATHOM_CONCAT_INNER(a, b) a##b
#define FATHOM_CONCAT(a, b) FATHOM_CONCAT_INNER(a, b)

// FATHOM_TRY(auto x, f()): x is f()'s value, or this function returns f()'s error (a Status, or
// what it becomes in this function's own error type).
// NOLINTBEGIN(bugprone-macro-parentheses): a declaration cannot stand in parentheses.
#define FATHOM_TRY(declaration, expression)                          \
  auto FATHOM_CONCAT(result_, __LINE__) = (expression);              \
  if (!FATHOM_CONCAT(result_, __LINE__))                             \
    return tl::unexpected(FATHOM_CONCAT(result_, __LINE__).error()); \
  declaration = std::move(*FATHOM_CONCAT(result_, __LINE__))
// NOLINTEND(bugprone-macro-parentheses)

// FATHOM_RETURN_IF_ERROR(f()): this function returns f()'s error if it failed.
#define FATHOM_RETURN_IF_ERROR(expression)                                             \
  do {                                                                                 \
    if (auto result_ = (expression); !result_) return tl::unexpected(result_.error()); \
  } while (false)
