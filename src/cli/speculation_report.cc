#include "cli/speculation_report.h"

#include <fmt/format.h>

namespace fathom {

std::string speculation_line(const SpeculationStats& stats) {
  if (stats.drafts == 0) return "";
  const auto share = [](int64_t part, int64_t of) {
    return 100 * static_cast<double>(part) / static_cast<double>(of);
  };
  std::string by_position;
  for (const int64_t accepted : stats.accepted_per_pos) {
    if (accepted == 0) break;
    by_position +=
        fmt::format("{}{:.1f}", by_position.empty() ? "" : ", ", share(accepted, stats.drafts));
  }
  if (by_position.empty()) by_position = "0";
  return fmt::format(
      "Drafts: {} of {} accepted ({:.1f} %; by position {} % of the windows), {:.2f} tokens a "
      "window\n",
      stats.accepted_tokens, stats.draft_tokens, share(stats.accepted_tokens, stats.draft_tokens),
      by_position,
      1 + static_cast<double>(stats.accepted_tokens) / static_cast<double>(stats.drafts));
}

void add_speculation(const SpeculationStats& stats, json::object& object) {
  if (stats.drafts == 0) return;
  object["speculation"] = {{"drafts", stats.drafts},
                           {"draft_tokens", stats.draft_tokens},
                           {"accepted_tokens", stats.accepted_tokens},
                           {"accepted_per_pos", json::value_from(stats.accepted_per_pos)}};
}

}  // namespace fathom
