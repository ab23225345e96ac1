// Finds stop strings in streamed text, and holds back text that may become one.
//
// The result does not depend on how the text is cut: the match that ends first wins, and the
// longest of those that end together. One object per sequence.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fathom {

class StopFilter {
 public:
  // No stop string may be empty. `include_stop`: the text ends after the match instead of before
  // it. `stop` must outlive this object.
  StopFilter(const std::vector<std::string>& stop, bool include_stop)
      : stop_(&stop), include_stop_(include_stop) {}

  // Consumes the next piece and appends to `out` what is safe to emit. Returns the index of the
  // stop string that ended the text; after that nothing may be pushed.
  std::optional<size_t> push(std::string_view piece, std::string& out);

  // Passes the next piece without a search, for text that must not end yet. No match begins in it.
  void pass(std::string_view piece, std::string& out);

  // Appends the text that was held back. Called when the text ends without a stop string.
  void flush(std::string& out);

 private:
  size_t longest_open_prefix() const;

  const std::vector<std::string>* stop_;
  bool include_stop_;
  std::string held_;  // between calls, shorter than the longest stop string
};

}  // namespace fathom
