// Finding markers in text that arrives in pieces.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

namespace fathom {

// Text that has arrived and is not decided yet.
class PendingText {
 public:
  void append(std::string_view text) { text_ += text; }
  std::string_view view() const { return std::string_view(text_).substr(start_); }
  void drop(size_t bytes) { start_ += bytes; }
  // Gives back the memory of what was dropped. Once per piece, not per decision, so that a piece
  // full of markers costs linear time. Views become invalid.
  void compact() {
    text_.erase(0, start_);
    start_ = 0;
  }

 private:
  std::string text_;
  size_t start_ = 0;
};

// What follows a text.
enum class TextEnd {
  kOpen,   // more text
  kWhole,  // nothing: the writer has ended
  kCut,    // nothing: the writer was interrupted
};

// Where a marker may stand: in text, where a "<" alone or a new line is more likely to be text, or
// inside a call, where nothing but markers and arguments is expected.
enum class MarkerPlace { kText, kCall };

struct MarkerScan {
  size_t before = 0;  // bytes before the marker; without one: bytes that no marker can begin in
  int marker = -1;    // index of the first complete marker, -1 for none
  size_t length = 0;  // of the marker; without one: of a marker's beginning that a cut left

  bool found() const { return marker >= 0; }
};

// The first complete marker in text. Without one, everything but the longest end that may still
// become a marker is `before`; all of it where nothing more comes, but for a marker's beginning
// that a cut left (in text it has at least one byte behind its "<"). The answer for the bytes in
// `before` does not depend on what follows them. Of markers that begin at one place the one named
// first counts, so name the longer first; none may lie inside another but at its end.
MarkerScan scan_markers(std::string_view text, std::initializer_list<std::string_view> markers,
                        TextEnd end, MarkerPlace place = MarkerPlace::kText);

inline bool is_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }
size_t leading_space(std::string_view text);  // bytes
std::string_view trim_space(std::string_view text);

}  // namespace fathom
