// What a person at a terminal sees and does: colour, and Ctrl-C.
#pragma once

#include <cstdio>
#include <string_view>

namespace fathom {

// A terminal on which colour is wanted: NO_COLOR (no-color.org) is not set, TERM is not "dumb".
bool has_color(std::FILE* stream);

// Escape sequences, or nothing where colour is not wanted.
struct Style {
  explicit Style(bool color)
      : dim(color ? "\033[2m" : ""), bold(color ? "\033[1m" : ""), reset(color ? "\033[0m" : "") {}
  std::string_view dim, bold, reset;
};

// While one lives, Ctrl-C does not end the program but is remembered here. Not nested; one thread.
class InterruptWatch {
 public:
  InterruptWatch();
  ~InterruptWatch();
  InterruptWatch(const InterruptWatch&) = delete;
  InterruptWatch& operator=(const InterruptWatch&) = delete;

  // Ctrl-C was pressed since the watch began or since clear().
  static bool interrupted();
  static void clear();
};

// The exit status of a program that Ctrl-C ended, as shells have it: 128 + SIGINT.
inline constexpr int kInterruptedExit = 130;

}  // namespace fathom
