#include "transfer/tcp/facts.h"

#include <fmt/format.h>

#include <algorithm>

namespace fathom {
namespace {

const std::string* find(const Facts& facts, const std::string& name) {
  const auto it = std::find_if(facts.begin(), facts.end(),
                               [&](const auto& fact) { return fact.first == name; });
  return it == facts.end() ? nullptr : &it->second;
}

std::string text_of(const std::string* value) {
  return value == nullptr ? "not told" : fmt::format("'{}'", *value);
}

}  // namespace

std::optional<std::string> first_difference(const Facts& decode, const Facts& prefill) {
  const auto difference = [&](const std::string& name) -> std::optional<std::string> {
    const std::string *const one = find(decode, name), *const other = find(prefill, name);
    if (one != nullptr && other != nullptr && *one == *other) return std::nullopt;
    return fmt::format("{} is {} on the decode side and {} on the prefill side", name, text_of(one),
                       text_of(other));
  };
  for (const Facts* facts : {&prefill, &decode}) {
    for (const auto& [name, value] : *facts) {
      if (auto told = difference(name)) return told;
    }
  }
  return std::nullopt;
}

std::string engine_id_text(uint64_t engine) { return fmt::format("{:016x}", engine); }

}  // namespace fathom
