// Reads lines from a person or a pipe. On a terminal with editing and history (if built with
// libedit), otherwise plain lines.
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

  // Reads the next line of stdin. The prompt is shown on terminals only, on stderr.
  Line read(const std::string& prompt);

  // Adds a line to the history.
  void remember(const std::string& line);

 private:
  struct Editor;
  Line read_plain();

  const bool terminal_;
  std::unique_ptr<Editor> editor_;  // null without libedit or without a terminal
  std::string buffered_;            // without an editor: read and not yet returned
  bool ended_ = false;
};

// The maximal length of a line; the rest of a longer one is returned as the next line.
inline constexpr size_t kMaxLineBytes = 16 << 20;

}  // namespace fathom
