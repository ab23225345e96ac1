#include "checkpoint/json_events.h"

#include <boost/json/basic_parser_impl.hpp>
#include <optional>
#include <string>

#include "base/json.h"

namespace fathom {
namespace {

// Boost.JSON's handler: concatenates the parts of keys and strings and forwards events to
// JsonEvents. Returning false stops the parser; failure_ then holds the error.
class Handler {
 public:
  static constexpr size_t max_object_size = static_cast<size_t>(-1);
  static constexpr size_t max_array_size = static_cast<size_t>(-1);
  // Strings are buffered while they are read; this bounds the buffer.
  static constexpr size_t max_key_size = 16 << 20;
  static constexpr size_t max_string_size = 16 << 20;

  explicit Handler(JsonEvents& events) : events_(events) {}

  const std::optional<Status>& failure() const { return failure_; }

  using Error = json::error_code;
  bool on_document_begin(Error&) { return true; }
  bool on_document_end(Error&) { return true; }
  bool on_object_begin(Error& ec) { return forward(events_.begin_object(), ec); }
  bool on_object_end(size_t, Error& ec) { return forward(events_.end_object(), ec); }
  bool on_array_begin(Error& ec) { return forward(events_.begin_array(), ec); }
  bool on_array_end(size_t, Error& ec) { return forward(events_.end_array(), ec); }
  bool on_key_part(std::string_view part, size_t, Error&) { return append(part); }
  bool on_key(std::string_view part, size_t, Error& ec) {
    append(part);
    return finish_text(events_.key(text_), ec);
  }
  bool on_string_part(std::string_view part, size_t, Error&) { return append(part); }
  bool on_string(std::string_view part, size_t, Error& ec) {
    append(part);
    return finish_text(events_.string(text_), ec);
  }
  bool on_number_part(std::string_view, Error&) { return true; }
  bool on_int64(int64_t value, std::string_view, Error& ec) {
    return forward(events_.integer(value), ec);
  }
  bool on_uint64(uint64_t value, std::string_view, Error& ec) {
    return forward(events_.other(fmt::format("{}", value)), ec);
  }
  bool on_double(double value, std::string_view, Error& ec) {
    return forward(events_.other(fmt::format("{}", value)), ec);
  }
  bool on_bool(bool value, Error& ec) {
    return forward(events_.other(value ? "true" : "false"), ec);
  }
  bool on_null(Error& ec) { return forward(events_.other("null"), ec); }
  bool on_comment_part(std::string_view, Error&) { return true; }
  bool on_comment(std::string_view, Error&) { return true; }

 private:
  bool append(std::string_view part) {
    text_.append(part);
    return true;
  }

  bool finish_text(Result<> result, Error& ec) {
    text_.clear();
    return forward(std::move(result), ec);
  }

  bool forward(Result<> result, Error& ec) {
    if (result) return true;
    failure_ = std::move(result.error());
    ec = json::error::exception;  // any code: the caller reports failure_
    return false;
  }

  JsonEvents& events_;
  std::string text_;
  std::optional<Status> failure_;
};

}  // namespace

Result<> stream_json(std::string_view text, std::string_view source, int max_depth,
                     JsonEvents& events) {
  json::parse_options options;
  options.max_depth = static_cast<size_t>(max_depth);
  json::basic_parser<Handler> parser(options, events);
  json::error_code failure;
  const size_t consumed = parser.write_some(false, text.data(), text.size(), failure);
  if (parser.handler().failure()) return tl::unexpected<Status>(*parser.handler().failure());
  if (failure == json::error::too_deep) {
    return invalid("{}: JSON nested deeper than {} levels", source, max_depth);
  }
  if (failure) {
    return invalid("{}: not valid JSON at byte {}: {}", source, consumed, failure.message());
  }
  const size_t rest = text.find_first_not_of(" \t\r\n", consumed);
  if (rest != std::string_view::npos) {
    return invalid("{}: not valid JSON: something follows the end at byte {}", source, rest);
  }
  return {};
}

}  // namespace fathom
