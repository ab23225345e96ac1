// Request targets, keys and text for the log: what comes out is what the rest may rely on.
//
// Input: a target, which is also taken as the value of header fields.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/utf8.h"
#include "server/http/key_ring.h"
#include "server/http/log_text.h"
#include "server/http/request_id.h"
#include "server/http/target.h"

namespace fathom::http {
namespace {

void check_decoded(std::string_view text) {
  FATHOM_CHECK(is_valid_utf8(text), "ill-formed text");
  FATHOM_CHECK(std::none_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20; }),
               "a control character");
}

void check_target(std::string_view text) {
  const auto target = parse_target(text);
  if (!target) return;
  for (const std::string& segment : target->segments) {
    check_decoded(segment);
    FATHOM_CHECK(segment != "." && segment != "..", "a path that climbs");
  }
  for (const Parameter& parameter : target->query) {
    check_decoded(parameter.name);
    check_decoded(parameter.value);
  }
  // A path is what it was taken for, whoever reads it again.
  const auto again = parse_target(target->path);
  FATHOM_CHECK(again && again->segments == target->segments, "the path means something else");
}

}  // namespace
}  // namespace fathom::http

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fathom::http;
  const std::string text(reinterpret_cast<const char*>(data), size);
  check_target(text);
  const std::string line = for_log(text);
  FATHOM_CHECK(std::all_of(line.begin(), line.end(), [](char c) { return c >= 0x20 && c < 0x7F; }),
               "a log line has more than visible characters");
  if (is_valid_request_id(text)) FATHOM_CHECK(for_log(text) == text, "an id that needs escaping");
  const Headers headers = {{"Authorization", text}, {"X-Api-Key", text}};
  for (const std::string_view key : presented_keys(headers)) {
    FATHOM_CHECK(!key.empty() && text.ends_with(key), "a key that was not presented");
  }
  static const KeyRing ring = *KeyRing::create({"sk-secret"}, {});
  Caller caller;
  if (ring.check(Access::kKey, headers, &caller) == KeyRing::Verdict::kGranted) {
    FATHOM_CHECK(text.ends_with("sk-secret"), "a wrong key opened");
  }
  return 0;
}
