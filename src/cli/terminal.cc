#include "cli/terminal.h"

#include <signal.h>
#include <unistd.h>

#include <cstdlib>

namespace fathom {
namespace {

volatile sig_atomic_t interrupted_flag = 0;
struct sigaction previous_action;

}  // namespace

bool has_color(std::FILE* stream) {
  const char* no_color = std::getenv("NO_COLOR");
  const char* terminal = std::getenv("TERM");
  if (no_color != nullptr && *no_color != '\0') return false;
  if (terminal != nullptr && std::string_view(terminal) == "dumb") return false;
  return isatty(fileno(stream)) == 1;
}

InterruptWatch::InterruptWatch() {
  clear();
  struct sigaction action = {};
  action.sa_handler = [](int) { interrupted_flag = 1; };
  // No SA_RESTART: a read from the terminal returns, so that the prompt is shown again.
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, &previous_action);
}

InterruptWatch::~InterruptWatch() { sigaction(SIGINT, &previous_action, nullptr); }

bool InterruptWatch::interrupted() { return interrupted_flag != 0; }

void InterruptWatch::clear() { interrupted_flag = 0; }

}  // namespace fathom
