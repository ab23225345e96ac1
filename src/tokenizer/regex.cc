#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer/regex.h"

#include <pcre2.h>

#include "base/check.h"

namespace fathom {
namespace {

constexpr uint32_t kMaxGroups = 16;  // groups reported; a pattern may have more

// Limits of one search, in PCRE2's units. Its default heap limit is 20 GB.
constexpr uint32_t kMatchLimit = 10'000'000;
constexpr uint32_t kHeapLimitKib = 64 * 1024;

const pcre2_match_context* match_limits() {
  static const pcre2_match_context* const context = [] {
    pcre2_match_context* made = pcre2_match_context_create(nullptr);
    FATHOM_CHECK(made != nullptr, "no memory for a PCRE2 match context");
    pcre2_set_match_limit(made, kMatchLimit);
    pcre2_set_heap_limit(made, kHeapLimitKib);
    return made;
  }();
  return context;
}

}  // namespace

void Regex::Free::operator()(pcre2_code* code) const { pcre2_code_free(code); }

Regex::Scratch::Scratch() : match_data_(pcre2_match_data_create(kMaxGroups, nullptr)) {
  FATHOM_CHECK(match_data_ != nullptr, "no memory for PCRE2 match data");
}
Regex::Scratch::~Scratch() { pcre2_match_data_free(match_data_); }

Result<Regex> Regex::compile(const std::string& pattern) {
  constexpr uint32_t kOptions = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
  int code = 0;
  PCRE2_SIZE offset = 0;
  Regex regex(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), kOptions,
                            &code, &offset, nullptr));
  if (regex.code_ == nullptr) {
    PCRE2_UCHAR message[160] = {};
    pcre2_get_error_message(code, message, sizeof(message));
    return invalid("is not a valid pattern: {}", reinterpret_cast<const char*>(message));
  }
  uint32_t matches_empty = 0;
  pcre2_pattern_info(regex.code_.get(), PCRE2_INFO_MATCHEMPTY, &matches_empty);
  if (matches_empty != 0) return invalid("can match the empty text, which cannot split");
  // Without JIT (on a hardened system) searches are slower, but work.
  pcre2_jit_compile(regex.code_.get(), PCRE2_JIT_COMPLETE);
  return regex;
}

std::optional<Match> Regex::find(std::string_view subject, size_t from, Scratch& scratch) const {
  const auto* text = reinterpret_cast<PCRE2_SPTR>(subject.data());
  // Neither context nor code is written to; PCRE2's interface lacks the const.
  auto* context = const_cast<pcre2_match_context*>(match_limits());
  const auto search = [&](uint32_t options) {
    return pcre2_match(code_.get(), text, subject.size(), from, options, scratch.match_data_,
                       context);
  };
  int count = search(PCRE2_NO_UTF_CHECK);
  if (count == PCRE2_ERROR_JIT_STACKLIMIT) count = search(PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT);
  if (count < 0) return std::nullopt;
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(scratch.match_data_);
  // A look-behind can begin a match before `from` only with \K, which is refused. An empty match
  // would loop forever.
  if (offsets[1] <= offsets[0] || offsets[0] < from) return std::nullopt;
  return Match{offsets[0], offsets[1], count == 0 ? 0 : count - 1};
}

}  // namespace fathom
