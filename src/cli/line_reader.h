// Lines from a person or a pipe. On a terminal with editing and history (libedit, where the build
// found it), elsewhere plain lines.
#pragma once

#include <memory>
#include <string>

namespace fathom {

class LineReader {
 public:
  enum class Outcome { kLine, kEnd, kInterrupt };  // kInterrupt: Ctrl-C (needs an InterruptWatch)
  struct Line {
    Outcome outcome = Outcome::kEnd;
    std::string text;  // without the line end
  };

  LineReader();
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  bool is_terminal() const { return terminal_; }

  // The next line of stdin. The prompt is shown on terminals only, on stderr.
  Line read(const std::string& prompt);

  // Makes a line reachable with the arrow keys.
  void remember(const std::string& line);

 private:
  struct Editor;
  Line read_plain();

  const bool terminal_;
  std::unique_ptr<Editor> editor_;  // none without libedit or without a terminal
  std::string buffered_;            // read and not yet handed out, without an editor
  bool ended_ = false;
};

// Longest line that is read; the rest of a longer one is the next line.
inline constexpr size_t kMaxLineBytes = 16 << 20;

}  // namespace fathom
