// fathom_probe: prints how fast this machine reads and multiplies, as text or with --json.
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "bench/probe/probe.h"

int main(int argc, char** argv) {
  CLI::App app("How fast this machine's threads read memory and multiply", "fathom_probe");
  int threads = 0;
  bool json = false;
  app.add_option("--threads", threads, "0: one a core")->check(CLI::Range(0, 1024));
  app.add_flag("--json", json, "Print one JSON object");
  CLI11_PARSE(app, argc, argv);
  const fathom::ProbeResult result = fathom::probe_machine(threads);
  fmt::print("{}", json ? to_json(result) + "\n" : to_text(result));
}
