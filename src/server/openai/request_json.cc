#include "server/openai/request_json.h"

#include <algorithm>
#include <boost/json/basic_parser_impl.hpp>
#include <charconv>
#include <cmath>

namespace fathom {
namespace {

// Builds the tree as json::stream_parser does, and enforces the limits. Our own refusal is stored
// in `refusal` and stops the parser.
class LimitedHandler {
 public:
  static constexpr size_t max_object_size = static_cast<size_t>(-1);
  static constexpr size_t max_array_size = static_cast<size_t>(-1);
  static constexpr size_t max_key_size = static_cast<size_t>(-1);
  static constexpr size_t max_string_size = static_cast<size_t>(-1);

  explicit LimitedHandler(size_t max_string_bytes) : max_string_bytes_(max_string_bytes) {}

  std::string refusal;
  const char* refusal_code = "invalid_json";
  json::value_stack stack;

  bool on_document_begin(json::error_code&) {
    stack.reset();
    return true;
  }
  bool on_document_end(json::error_code&) { return true; }

  bool on_object_begin(json::error_code&) {
    first_key_.push_back(keys_.size());
    return true;
  }
  bool on_object_end(size_t size, json::error_code& failure) {
    const auto begin = keys_.begin() + static_cast<ptrdiff_t>(first_key_.back());
    std::sort(begin, keys_.end());
    const auto twice = std::adjacent_find(begin, keys_.end());
    if (twice != keys_.end()) {
      return refuse(failure, fmt::format("the key {} is there twice in one object",
                                         brief(json::value(*twice))));
    }
    keys_.erase(begin, keys_.end());
    first_key_.pop_back();
    stack.push_object(size);
    return count_value(failure);
  }
  bool on_array_begin(json::error_code&) { return true; }
  bool on_array_end(size_t size, json::error_code& failure) {
    stack.push_array(size);
    return count_value(failure);
  }

  bool on_key_part(json::string_view part, size_t, json::error_code&) {
    key_ += std::string_view(part.data(), part.size());
    stack.push_chars(part);
    return true;
  }
  bool on_key(json::string_view part, size_t, json::error_code& failure) {
    key_ += std::string_view(part.data(), part.size());
    stack.push_key(part);
    keys_.push_back(std::move(key_));
    key_.clear();
    if (++num_keys_ > kMaxJsonKeys) {
      return refuse(failure, fmt::format("the body has more than {} keys", kMaxJsonKeys));
    }
    return true;
  }
  bool on_string_part(json::string_view part, size_t size, json::error_code& failure) {
    if (size > max_string_bytes_) return refuse_string(failure);
    stack.push_chars(part);
    return true;
  }
  bool on_string(json::string_view part, size_t size, json::error_code& failure) {
    if (size > max_string_bytes_) return refuse_string(failure);
    stack.push_string(part);
    return count_value(failure);
  }

  bool on_number_part(json::string_view, json::error_code&) { return true; }
  bool on_int64(int64_t number, json::string_view, json::error_code& failure) {
    stack.push_int64(number);
    return count_value(failure);
  }
  bool on_uint64(uint64_t number, json::string_view, json::error_code& failure) {
    stack.push_uint64(number);
    return count_value(failure);
  }
  // Converts exactly. The parser's own conversion may be off by some units in the last place, which
  // moves a number over a field's limit and turns 0e309 into NaN. `text` is complete, because the
  // body comes in one piece.
  bool on_double(double rounded, json::string_view text, json::error_code& failure) {
    double number = 0;
    const auto exact = std::from_chars(text.data(), text.data() + text.size(), number);
    if (exact.ec != std::errc()) number = rounded;  // out of range: 0 or infinite
    if (!std::isfinite(number)) return refuse(failure, "a number is larger than a double can be");
    stack.push_double(number);
    return count_value(failure);
  }
  bool on_bool(bool flag, json::error_code& failure) {
    stack.push_bool(flag);
    return count_value(failure);
  }
  bool on_null(json::error_code& failure) {
    stack.push_null();
    return count_value(failure);
  }
  bool on_comment_part(json::string_view, json::error_code&) { return true; }
  bool on_comment(json::string_view, json::error_code&) { return true; }

 private:
  bool refuse(json::error_code& failure, std::string why) {
    refusal = std::move(why);
    failure = json::error::syntax;
    return false;
  }
  bool refuse_string(json::error_code& failure) {
    refusal_code = "context_length_exceeded";
    return refuse(failure, fmt::format("the body has a string of more than {} bytes, which is more "
                                       "than the context can hold",
                                       max_string_bytes_));
  }
  bool count_value(json::error_code& failure) {
    if (++num_values_ <= kMaxJsonValues) return true;
    return refuse(failure, fmt::format("the body has more than {} values", kMaxJsonValues));
  }

  const size_t max_string_bytes_;
  std::string key_;                // incomplete key
  std::vector<std::string> keys_;  // keys of all open objects, outermost first
  std::vector<size_t> first_key_;  // index in keys_ of each open object's first key
  size_t num_keys_ = 0, num_values_ = 0;
};

}  // namespace

ApiResult<json::object> parse_request_json(std::string_view body, size_t max_string_bytes) {
  const auto refuse = [](std::string why, const char* code = "invalid_json") {
    return tl::unexpected(ApiError(400, std::move(why), std::nullopt, code));
  };
  if (body.size() > kMaxBodyBytes) {
    return tl::unexpected(ApiError(
        413, fmt::format("the body has {} bytes, the limit is {}", body.size(), kMaxBodyBytes),
        std::nullopt, "request_too_large"));
  }
  if (body.starts_with("\xEF\xBB\xBF")) {
    return refuse("the body begins with a byte order mark, which JSON does not have");
  }
  json::parse_options options;
  options.max_depth = kMaxJsonDepth;
  json::basic_parser<LimitedHandler> parser(options, max_string_bytes);
  json::error_code failure;
  const size_t consumed = parser.write_some(false, body.data(), body.size(), failure);
  const std::string& refusal = parser.handler().refusal;
  if (!refusal.empty()) return refuse(refusal, parser.handler().refusal_code);
  if (failure == json::error::too_deep) {
    return refuse(fmt::format("the body is nested deeper than {} levels", kMaxJsonDepth));
  }
  if (failure) {
    return refuse(
        fmt::format("the body is not valid JSON at byte {}: {}", consumed, failure.message()));
  }
  if (const size_t rest = body.find_first_not_of(" \t\r\n", consumed);
      rest != std::string_view::npos) {
    return refuse(
        fmt::format("the body is not valid JSON: something follows its end at byte {}", rest));
  }
  json::value value = parser.handler().stack.release();
  if (!value.is_object()) {
    return refuse(fmt::format("the body is {}, expected a JSON object", brief(value)));
  }
  return std::move(value.get_object());
}

}  // namespace fathom
