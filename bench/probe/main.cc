// fathom_probe: prints how fast this machine reads and multiplies, as text or with --json; with
// --read-bytes, each pass over so many bytes.
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "bench/probe/probe.h"

int main(int argc, char** argv) {
  CLI::App app("How fast this machine's threads read memory and multiply", "fathom_probe");
  int threads = 0;
  int64_t read_bytes = 0;
  double seconds = 1;
  bool json = false;
  app.add_option("--threads", threads, "0: one a core")->check(CLI::Range(0, 1024));
  app.add_flag("--json", json, "Print one JSON object");
  app.add_option("--read-bytes", read_bytes,
                 "Only read so many bytes; the rate of each pass as JSON")
      ->check(CLI::Range(int64_t{1} << 20, int64_t{1} << 40));
  app.add_option("--seconds", seconds, "of reading, with --read-bytes")
      ->check(CLI::Range(0.0, 60.0));
  CLI11_PARSE(app, argc, argv);
  if (read_bytes > 0) {
    fathom::ThreadPool pool(threads);
    fmt::print("{{\"threads\":{},\"bytes\":{},\"passes_gb_per_s\":[", pool.num_threads(),
               read_bytes);
    const auto passes = fathom::probe_read_passes(pool, read_bytes, seconds);
    for (size_t i = 0; i < passes.size(); ++i)
      fmt::print("{}{:.2f}", i ? "," : "", passes[i] / 1e9);
    fmt::print("]}}\n");
    return passes.empty() ? 1 : 0;
  }
  const fathom::ProbeResult result = fathom::probe_machine(threads);
  fmt::print("{}", json ? to_json(result) + "\n" : to_text(result));
}
