#include "chat/marker_scan.h"

namespace fathom {

MarkerScan scan_markers(std::string_view text, std::initializer_list<std::string_view> markers,
                        TextEnd end, MarkerPlace place) {
  for (size_t i = 0; i < text.size(); ++i) {
    const std::string_view rest = text.substr(i);
    int index = 0;
    bool partial = false;
    for (const std::string_view marker : markers) {
      if (rest[0] == marker[0]) {
        if (rest.starts_with(marker)) return {i, index, marker.size()};
        partial = partial || marker.starts_with(rest);
      }
      ++index;
    }
    if (!partial) continue;
    if (end == TextEnd::kOpen) return {i, -1, 0};
    const size_t open = rest.find('<');
    const bool is_clear =
        place == MarkerPlace::kCall || (open != std::string_view::npos && open + 1 < rest.size());
    if (end == TextEnd::kCut && is_clear) return {i, -1, rest.size()};
  }
  return {text.size(), -1, 0};
}

size_t leading_space(std::string_view text) {
  size_t count = 0;
  while (count < text.size() && is_space(text[count])) ++count;
  return count;
}

std::string_view trim_space(std::string_view text) {
  text.remove_prefix(leading_space(text));
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

}  // namespace fathom
