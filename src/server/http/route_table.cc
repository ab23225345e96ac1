#include "server/http/route_table.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "base/check.h"

namespace fathom::http {
namespace {

enum class Part { kExact, kOne, kRest };

Part part_of(std::string_view segment) {
  if (!segment.starts_with('{')) return Part::kExact;
  return segment.ends_with("...}") ? Part::kRest : Part::kOne;
}

std::string name_in(std::string_view segment) {
  const size_t marks = part_of(segment) == Part::kRest ? 5 : 2;  // length of "{...}" or "{}"
  return std::string(segment.substr(1, segment.size() - marks));
}

std::vector<std::string> split(std::string_view path) {
  std::vector<std::string> segments;
  path.remove_prefix(1);
  for (size_t end; (end = path.find('/')) != std::string_view::npos;) {
    segments.emplace_back(path.substr(0, end));
    path.remove_prefix(end + 1);
  }
  segments.emplace_back(path);
  return segments;
}

void check_pattern(const std::string& pattern, const std::vector<std::string>& segments) {
  for (size_t i = 0; i < segments.size(); ++i) {
    const std::string& segment = segments[i];
    if (part_of(segment) == Part::kExact) {
      FATHOM_CHECK(segment.find_first_of("{}") == std::string::npos, "route '{}': stray brace",
                   pattern);
      continue;
    }
    FATHOM_CHECK(segment.ends_with('}') && !name_in(segment).empty(),
                 "route '{}': '{}' is not {{name}} or {{name...}}", pattern, segment);
    FATHOM_CHECK(part_of(segment) == Part::kOne || i + 1 == segments.size(),
                 "route '{}': {} must come last", pattern, segment);
  }
}

// Returns the path parameters if `path` matches; both lists are whole segments.
std::optional<std::vector<Parameter>> match(std::span<const std::string> pattern,
                                            std::span<const std::string> path) {
  std::vector<Parameter> parameters;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (i >= path.size()) return std::nullopt;
    switch (part_of(pattern[i])) {
      case Part::kExact:
        if (pattern[i] != path[i]) return std::nullopt;
        break;
      case Part::kOne:
        if (path[i].empty()) return std::nullopt;
        parameters.push_back({name_in(pattern[i]), path[i]});
        break;
      case Part::kRest: {
        std::string rest = path[i];
        for (size_t k = i + 1; k < path.size(); ++k) rest.append("/").append(path[k]);
        if (rest.empty()) return std::nullopt;
        parameters.push_back({name_in(pattern[i]), std::move(rest)});
        return parameters;
      }
    }
  }
  if (pattern.size() != path.size()) return std::nullopt;
  return parameters;
}

// Orders patterns that match the same path: exact before {one} before {rest...}, from the left.
bool more_exact(std::span<const std::string> a, std::span<const std::string> b) {
  return std::lexicographical_compare(
      a.begin(), a.end(), b.begin(), b.end(),
      [](const std::string& x, const std::string& y) { return part_of(x) < part_of(y); });
}

}  // namespace

std::string_view name_of(Method method) {
  switch (method) {
    case Method::kGet:
      return "GET";
    case Method::kPost:
      return "POST";
    case Method::kPut:
      return "PUT";
    case Method::kDelete:
      return "DELETE";
  }
  return "GET";
}

std::string_view name_of(Access access) {
  switch (access) {
    case Access::kPublic:
      return "public";
    case Access::kKey:
      return "key";
    case Access::kOperator:
      return "operator";
    case Access::kAdmin:
      return "admin";
  }
  return "admin";
}

void RouteTable::add(Method method, std::string pattern, Access access, Handler handler,
                     RouteOptions options, Gate gate) {
  FATHOM_CHECK(pattern.starts_with('/'), "route '{}' does not begin with a slash", pattern);
  std::vector<std::string> segments = split(pattern);
  check_pattern(pattern, segments);
  FATHOM_CHECK(handler != nullptr, "route '{}' has no handler", pattern);
  for (const Route& route : routes_) {
    FATHOM_CHECK(route.method != method || route.pattern != pattern, "route {} '{}' is there twice",
                 name_of(method), pattern);
  }
  patterns_.push_back(std::move(segments));
  routes_.push_back(
      {method, std::move(pattern), access, std::move(handler), options, std::move(gate)});
}

RouteTable::Match RouteTable::find(std::string_view method,
                                   const std::vector<std::string>& segments) const {
  const std::string_view wanted = method == "HEAD" ? "GET" : method;
  Match best;
  const std::vector<std::string>* best_pattern = nullptr;
  for (size_t i = 0; i < routes_.size(); ++i) {
    const Route& route = routes_[i];
    auto parameters = match(patterns_[i], segments);
    if (!parameters) continue;
    if (std::find(best.allowed.begin(), best.allowed.end(), route.method) == best.allowed.end()) {
      best.allowed.push_back(route.method);
    }
    if (name_of(route.method) != wanted) continue;
    if (best_pattern == nullptr || more_exact(patterns_[i], *best_pattern)) {
      best.route = &route;
      best.path_parameters = std::move(*parameters);
      best_pattern = &patterns_[i];
    }
  }
  return best;
}

}  // namespace fathom::http
