#include "cli/foreign_flags.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <iterator>
#include <sstream>

namespace fathom {
namespace {

struct Outcome {
  std::vector<std::string> notes;
  std::string error;
};

Outcome parse(const std::string& line) {
  Outcome outcome;
  CLI::App app;
  add_foreign_flags(app, &outcome.notes);
  std::istringstream words(line);
  std::vector<std::string> arguments{std::istream_iterator<std::string>(words), {}};
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::ParseError& problem) {
    outcome.error = problem.what();
  }
  return outcome;
}

TEST(ForeignFlags, AreNotedInOneLineEach) {
  const Outcome outcome = parse("--trust-remote-code --mem-fraction-static 0.8");
  EXPECT_EQ(outcome.error, "");
  EXPECT_EQ(outcome.notes,
            (std::vector<std::string>{
                "--trust-remote-code has no effect: no code of a checkpoint is ever run",
                "--gpu-memory-utilization has no effect: --max-total-tokens sets the size of the "
                "cache"}));
  EXPECT_TRUE(parse("").notes.empty());
  EXPECT_TRUE(parse("--trust-remote-code=false").notes.empty());
}

TEST(ForeignFlags, LaunchLinesOfOtherEnginesAreTaken) {
  for (const char* line :
       {"--trust-remote-code --enable-torch-compile --torch-compile-max-bs 8 "
        "--attention-backend flashinfer --mem-fraction-static 0.9 --tp 1 --page-size 64 "
        "--cuda-graph-max-bs 8 --enable-metrics --schedule-policy lpm --enable-cache-report",
        "--gpu-memory-utilization 0.95 --tensor-parallel-size 1 --block-size 64 --swap-space 4 "
        "--trust-remote-code --reasoning-parser deepseek_r1 --tool-call-parser deepseek_v3 "
        "--enable-auto-tool-choice --uvicorn-log-level warning --enable-chunked-prefill "
        "--disable-log-stats --pipeline-parallel-size 1"}) {
    const Outcome outcome = parse(line);
    EXPECT_EQ(outcome.error, "");
    for (const std::string& note : outcome.notes) {
      EXPECT_NE(note.find(" has no effect: "), std::string::npos) << note;
      EXPECT_EQ(note.find('\n'), std::string::npos);
    }
    EXPECT_GE(outcome.notes.size(), 9u);
  }
}

TEST(ForeignFlags, WhatIsNotThereIsRefused) {
  EXPECT_EQ(parse("--tp 8").error,
            "--tensor-parallel-size is \"8\", allowed is 1: parallelism over devices is not there "
            "yet");
  EXPECT_EQ(parse("--page-size 16").error,
            "--block-size is \"16\", allowed is 64: pages of the cache have 64 tokens");
  EXPECT_EQ(parse("--nnodes two").error,
            "--nnodes is \"two\", allowed is 1: parallelism over machines is not there yet");
  EXPECT_NE(parse("--attention-backend").error, "");
}

}  // namespace
}  // namespace fathom
