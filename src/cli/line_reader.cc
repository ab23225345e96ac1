#include "cli/line_reader.h"

#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <cstdio>
#include <cwchar>

#include "cli/terminal.h"

#ifdef FATHOM_HAVE_LIBEDIT
#include <histedit.h>
#endif

namespace fathom {
namespace {

// One line without its end from stdin, byte by byte: Ctrl-C ends the wait.
LineReader::Line read_plain() {
  LineReader::Line line;
  while (line.text.size() < kMaxLineBytes) {
    errno = 0;
    const int c = std::getc(stdin);
    if (c == EOF) {
      if (errno == EINTR) {
        std::clearerr(stdin);
        if (!InterruptWatch::interrupted()) continue;
        return {LineReader::Outcome::kInterrupt, ""};
      }
      line.outcome = line.text.empty() ? LineReader::Outcome::kEnd : LineReader::Outcome::kLine;
      return line;
    }
    if (c == '\n') break;
    line.text += static_cast<char>(c);
  }
  if (line.text.ends_with('\r')) line.text.pop_back();
  line.outcome = LineReader::Outcome::kLine;
  return line;
}

}  // namespace

#ifdef FATHOM_HAVE_LIBEDIT

struct LineReader::Editor {
  EditLine* line = nullptr;
  History* history = nullptr;
  std::string prompt;

  Editor() {
    // Characters beyond ASCII are only typed right in a UTF-8 locale.
    if (std::setlocale(LC_CTYPE, "") == nullptr || MB_CUR_MAX == 1) {
      std::setlocale(LC_CTYPE, "C.UTF-8");
    }
    line = el_init("fathom", stdin, stderr, stderr);
    history = history_init();
    HistEvent event;
    ::history(history, &event, H_SETSIZE, 1000);
    ::history(history, &event, H_SETUNIQUE, 1);
    el_set(line, EL_CLIENTDATA, this);
    el_set(line, EL_EDITOR, "emacs");
    el_set(line, EL_HIST, ::history, history);
    el_set(line, EL_PROMPT, &show_prompt);
    // libedit's own reader goes on after an interrupt; this one ends the line.
    el_set(line, EL_GETCFN, &read_character);
  }
  ~Editor() {
    el_end(line);
    history_end(history);
  }

  static char* show_prompt(EditLine* line) {
    void* self = nullptr;
    el_get(line, EL_CLIENTDATA, &self);
    return static_cast<Editor*>(self)->prompt.data();
  }

  static int read_character(EditLine*, wchar_t* out) {
    std::mbstate_t state = {};
    for (;;) {
      char byte = 0;
      const ssize_t count = ::read(STDIN_FILENO, &byte, 1);
      if (count == 0) return 0;
      if (count < 0) {
        if (errno == EINTR && !InterruptWatch::interrupted()) continue;
        return -1;
      }
      const size_t used = std::mbrtowc(out, &byte, 1, &state);
      if (used == static_cast<size_t>(-2)) continue;  // the character has more bytes
      if (used == static_cast<size_t>(-1)) {
        state = {};
        continue;
      }
      return 1;
    }
  }
};

LineReader::Line LineReader::read(const std::string& prompt) {
  if (!editor_) return read_plain();
  editor_->prompt = prompt;
  int count = 0;
  const char* text = el_gets(editor_->line, &count);
  if (InterruptWatch::interrupted()) {
    std::fputs("^C\n", stderr);
    return {Outcome::kInterrupt, ""};
  }
  if (text == nullptr || count <= 0) return {Outcome::kEnd, ""};
  Line line{Outcome::kLine, std::string(text, static_cast<size_t>(count))};
  while (line.text.ends_with('\n') || line.text.ends_with('\r')) line.text.pop_back();
  return line;
}

void LineReader::remember(const std::string& line) {
  if (!editor_ || line.empty()) return;
  HistEvent event;
  ::history(editor_->history, &event, H_ENTER, line.c_str());
}

#else

struct LineReader::Editor {};

LineReader::Line LineReader::read(const std::string& prompt) {
  if (terminal_) std::fputs(prompt.c_str(), stderr);
  return read_plain();
}

void LineReader::remember(const std::string&) {}

#endif

LineReader::LineReader() : terminal_(isatty(STDIN_FILENO) == 1) {
  if (terminal_) editor_ = std::make_unique<Editor>();
}

LineReader::~LineReader() = default;

}  // namespace fathom
