// Finds markers in streamed text.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

namespace fathom {

// Text that has arrived but is not decided yet.
class PendingText {
 public:
  void append(std::string_view text) { text_ += text; }
  std::string_view view() const { return std::string_view(text_).substr(start_); }
  void drop(size_t bytes) { start_ += bytes; }
  // Frees the memory of dropped text and invalidates views. Call once per piece, not per decision,
  // so that a piece full of markers takes linear time.
  void compact() {
    text_.erase(0, start_);
    start_ = 0;
  }

 private:
  std::string text_;
  size_t start_ = 0;
};

// What may follow a text.
enum class TextEnd {
  kOpen,   // more text
  kWhole,  // nothing: it is complete
  kCut,    // nothing: it was interrupted
};

// Where a marker may occur: in text, where a lone "<" or newline is more likely to be text, or
// inside a call, where only markers and arguments are expected.
enum class MarkerPlace { kText, kCall };

struct MarkerScan {
  size_t before = 0;  // bytes before the marker; without one: bytes in which no marker can begin
  int marker = -1;    // index of the first complete marker, -1 for none
  size_t length = 0;  // of the marker; without one: of the partial marker at a cut end

  bool found() const { return marker >= 0; }
};

// Finds the first complete marker in `text`. Without one, `before` is everything up to the longest
// suffix that may still become a marker. If nothing more comes, it is all of the text, except for a
// partial marker at a cut end (in kText at least "<" and one more byte). The result for the first
// `before` bytes does not depend on what follows them. If several markers begin at one position,
// the first in the list wins, so list longer ones first. No marker may occur inside another except
// at its end.
MarkerScan scan_markers(std::string_view text, std::initializer_list<std::string_view> markers,
                        TextEnd end, MarkerPlace place = MarkerPlace::kText);

inline bool is_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }
size_t leading_space(std::string_view text);  // bytes
std::string_view trim_space(std::string_view text);

}  // namespace fathom
