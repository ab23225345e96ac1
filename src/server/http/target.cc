#include "server/http/target.h"

#include <algorithm>
#include <utility>

#include "base/utf8.h"

namespace fathom::http {
namespace {

// RFC 3986 forbids these everywhere. Some clients send them in queries, so only paths refuse them.
constexpr std::string_view kNotInPaths = "\"<>\\^`{|}";

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

Result<std::string> decode(std::string_view text, bool plus_is_space) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '+' && plus_is_space) {
      out.push_back(' ');
    } else if (text[i] != '%') {
      out.push_back(text[i]);
    } else {
      const int high = i + 2 < text.size() ? hex_digit(text[i + 1]) : -1;
      const int low = i + 2 < text.size() ? hex_digit(text[i + 2]) : -1;
      if (high < 0 || low < 0)
        return invalid("the request target has a '%' without two hex digits");
      out.push_back(static_cast<char>(high * 16 + low));
      i += 2;
    }
  }
  if (std::any_of(out.begin(), out.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; })) {
    return invalid("the request target has an encoded control character");
  }
  if (!is_valid_utf8(out)) return invalid("the request target is not UTF-8 once decoded");
  return out;
}

// Calls part(text) for each piece between separators; stops at the first error.
template <typename Part>
Result<> for_each_part(std::string_view text, char separator, Part part) {
  for (size_t end; (end = text.find(separator)) != std::string_view::npos;) {
    FATHOM_RETURN_IF_ERROR(part(text.substr(0, end)));
    text.remove_prefix(end + 1);
  }
  return part(text);
}

Result<std::vector<std::string>> decode_segments(std::string_view path) {
  std::vector<std::string> segments;
  FATHOM_RETURN_IF_ERROR(for_each_part(path.substr(1), '/', [&](std::string_view part) -> Result<> {
    auto segment = decode(part, false);
    if (!segment) return tl::unexpected<Status>(segment.error());
    if (*segment == "." || *segment == "..") {
      return invalid("the request target has a segment '{}'", *segment);
    }
    segments.push_back(std::move(*segment));
    return {};
  }));
  return segments;
}

Result<std::vector<Parameter>> decode_query(std::string_view query) {
  std::vector<Parameter> parameters;
  FATHOM_RETURN_IF_ERROR(for_each_part(query, '&', [&](std::string_view part) -> Result<> {
    if (part.empty()) return {};
    if (std::ssize(parameters) == kMaxQueryParameters) {
      return invalid("the request target has more than {} query parameters", kMaxQueryParameters);
    }
    const size_t equals = part.find('=');
    FATHOM_TRY(std::string name, decode(part.substr(0, equals), true));
    FATHOM_TRY(std::string value,
               decode(equals == std::string_view::npos ? "" : part.substr(equals + 1), true));
    parameters.push_back({std::move(name), std::move(value)});
    return {};
  }));
  return parameters;
}

// Returns "/path?query" for "http://host/path?query" and other targets unchanged.
std::string_view without_authority(std::string_view target) {
  const size_t scheme = target.find("://");
  if (scheme == std::string_view::npos) return target;
  const std::string_view name = target.substr(0, scheme);
  if (!equal_ignoring_case(name, "http") && !equal_ignoring_case(name, "https")) return target;
  const std::string_view rest = target.substr(scheme + 3);
  const size_t path = rest.find_first_of("/?");
  if (rest.empty() || path == 0) return target;  // no host
  if (path == std::string_view::npos) return "/";
  return rest.substr(path);
}

}  // namespace

Result<Target> parse_target(std::string_view target) {
  if (target == "*") return Target{.path = "*", .segments = {}, .query = {}};
  if (std::any_of(target.begin(), target.end(),
                  [](unsigned char c) { return c <= 0x20 || c >= 0x7F || c == '#'; })) {
    return invalid("the request target has a character that must be percent-encoded");
  }
  const std::string_view origin_form = without_authority(target);
  const size_t question = origin_form.find('?');
  std::string_view path = origin_form.substr(0, question);
  if (path.empty() && origin_form.size() < target.size()) path = "/";  // "http://host?query"
  if (!path.starts_with('/')) return invalid("the request target does not begin with a slash");
  if (path.find_first_of(kNotInPaths) != std::string_view::npos) {
    return invalid("the request target has a character that must be percent-encoded");
  }
  FATHOM_TRY(std::vector<std::string> segments, decode_segments(path));
  std::vector<Parameter> query;
  if (question != std::string_view::npos) {
    FATHOM_TRY(query, decode_query(origin_form.substr(question + 1)));
  }
  return Target{std::string(path), std::move(segments), std::move(query)};
}

}  // namespace fathom::http
