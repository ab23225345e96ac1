// Terminal output and input: colour, and Ctrl-C.
#pragma once

#include <cstdio>
#include <string_view>

namespace fathom {

// Whether the stream is a terminal with colour: NO_COLOR (no-color.org) is not set, TERM is not
// "dumb".
bool has_color(std::FILE* stream);

// Escape sequences; empty without colour.
struct Style {
  explicit Style(bool color)
      : dim(color ? "\033[2m" : ""), bold(color ? "\033[1m" : ""), reset(color ? "\033[0m" : "") {}
  std::string_view dim, bold, reset;
};

// While one lives, Ctrl-C is recorded instead of ending the program. Must not be nested; one
// thread.
class InterruptWatch {
 public:
  InterruptWatch();
  ~InterruptWatch();
  InterruptWatch(const InterruptWatch&) = delete;
  InterruptWatch& operator=(const InterruptWatch&) = delete;

  // Whether Ctrl-C was pressed since the watch began or since clear().
  static bool interrupted();
  static void clear();
};

// The exit status after Ctrl-C, as in shells: 128 + SIGINT.
inline constexpr int kInterruptedExit = 130;

}  // namespace fathom
