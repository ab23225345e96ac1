#include "cli/line_reader.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
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

// Reads available bytes of stdin; 0 at the end, -1 after Ctrl-C. The signal is blocked except
// during the wait itself, so that a Ctrl-C between checking the flag and waiting is not lost.
ssize_t read_input(char* out, size_t size) {
  sigset_t interrupt, before;
  sigemptyset(&interrupt);
  sigaddset(&interrupt, SIGINT);
  pthread_sigmask(SIG_BLOCK, &interrupt, &before);
  pollfd input{STDIN_FILENO, POLLIN, 0};
  int ready = -1;
  while (ready < 0 && !InterruptWatch::interrupted()) {
    ready = ppoll(&input, 1, nullptr, &before);
    if (ready < 0 && errno != EINTR) break;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (InterruptWatch::interrupted()) return -1;
  return ready > 0 ? std::max<ssize_t>(::read(STDIN_FILENO, out, size), 0) : 0;
}

}  // namespace

// Reads one line, without its end.
LineReader::Line LineReader::read_plain() {
  for (;;) {
    const size_t end = buffered_.find('\n');
    if (end != std::string::npos || ended_ || buffered_.size() >= kMaxLineBytes) {
      if (buffered_.empty()) return {};
      Line line{Outcome::kLine, buffered_.substr(0, std::min(end, kMaxLineBytes))};
      buffered_.erase(0, line.text.size() + (end == line.text.size() ? 1 : 0));
      if (line.text.ends_with('\r')) line.text.pop_back();
      return line;
    }
    char block[4096];
    const ssize_t count = read_input(block, sizeof block);
    if (count < 0) return {Outcome::kInterrupt, ""};
    if (count == 0) ended_ = true;
    buffered_.append(block, static_cast<size_t>(count));
  }
}

#ifdef FATHOM_HAVE_LIBEDIT

struct LineReader::Editor {
  EditLine* line = nullptr;
  History* history = nullptr;
  std::string prompt;

  Editor() {
    // Non-ASCII input is correct only in a UTF-8 locale.
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
    // libedit's own reader continues after an interrupt; this one ends the line.
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
      const ssize_t count = read_input(&byte, 1);
      if (count <= 0) return static_cast<int>(count);
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
