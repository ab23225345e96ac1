// Finds stop strings in a text that arrives in pieces, and holds back what may become one.
//
// The result does not depend on how the text is cut: the match that ends first wins, the longest of
// those that end together. One object a sequence.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fathom {

class StopFilter {
 public:
  // No string is empty. `include_stop`: the text ends after the match, not before it. The strings
  // must outlive this object.
  StopFilter(const std::vector<std::string>& stop, bool include_stop)
      : stop_(&stop), include_stop_(include_stop) {}

  // Takes the next piece and appends to `out` what is safe to show. Returns the index of the stop
  // string that ended the text, after which nothing more may be pushed.
  std::optional<size_t> push(std::string_view piece, std::string& out);

  // The next piece without a search, for text that must not end yet. No match begins in it.
  void pass(std::string_view piece, std::string& out);

  // Appends what is held back: the text has ended otherwise.
  void flush(std::string& out);

 private:
  size_t longest_open_prefix() const;

  const std::vector<std::string>* stop_;
  bool include_stop_;
  std::string held_;  // shorter than the longest stop string between calls
};

}  // namespace fathom
