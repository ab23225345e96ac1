#include "cli/config_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <fstream>
#include <optional>

#include "cli/command_line.h"
#include "cli/flags.h"

namespace fathom {
namespace {

class ConfigFile : public testing::Test {
 protected:
  ~ConfigFile() override { unlink(path_.c_str()); }

  void write(const std::string& text) { std::ofstream(path_, std::ios::trunc) << text; }

  // The file's arguments for a command line `typed`, joined by spaces; or the error without the
  // path.
  std::string arguments(const std::string& text, std::vector<std::string> typed = {}) {
    write(text);
    CLI::App app("", "serve");
    std::string host, config;
    std::vector<std::string> names;
    int64_t port = 8000, seqs = 1;
    std::optional<bool> log;
    FlagGroup group(app, "Flags");
    group.text("--host", &host, "HOST", "");
    group.text("--config", &config, "FILE", "");
    group.texts("--served-model-name", &names, "NAME", "");
    group.count("-p,--port", &port, 0, 65535, "");
    group.count("--max-num-seqs,--max-running-requests", &seqs, 1, 1024, "");
    group.toggle("--log-requests,!--no-log-requests", &log, "");
    app.parse(std::vector<std::string>(typed.rbegin(), typed.rend()));
    const auto result = config_arguments(path_, app);
    if (!result) {
      std::string message = result.error().message;
      if (const size_t at = message.find(path_); at != std::string::npos) {
        message.replace(at, path_.size(), "FILE");
      }
      return message;
    }
    std::string joined;
    for (const std::string& argument : result->arguments)
      joined += (joined.empty() ? "" : " ") + argument;
    return joined;
  }

  const std::string path_ =
      testing::TempDir() + "fathom-config-" + std::to_string(getpid()) + ".yaml";
};

TEST_F(ConfigFile, KeysAreFlagsWithEitherDash) {
  EXPECT_EQ(arguments("# a comment\n"
                      "host: 0.0.0.0\n"
                      "max_num_seqs: 4K\n"
                      "served-model-name: [tiny, \"with space\"]\n"
                      "no-log-requests: true\n"
                      "port: '9000'\n"),
            "--host=0.0.0.0 --max-num-seqs=4K --served-model-name=tiny "
            "--served-model-name=with space --no-log-requests=true --port=9000");
  EXPECT_EQ(arguments(""), "");
  EXPECT_EQ(arguments("# nothing\n"), "");
}

TEST_F(ConfigFile, CommandLineThenEnvironmentThenFile) {
  const std::string file = "port: 1\nmax-running-requests: 2\nhost: file\nlog-requests: true\n";
  EXPECT_EQ(arguments(file, {"-p", "9", "--no-log-requests"}), "--max-num-seqs=2 --host=file");
  setenv("FATHOM_MAX_NUM_SEQS", "7", 1);
  setenv("FATHOM_HOST", "environment", 1);
  EXPECT_EQ(arguments(file, {"--log-requests"}), "--port=1");
  unsetenv("FATHOM_MAX_NUM_SEQS");
  unsetenv("FATHOM_HOST");
}

TEST_F(ConfigFile, TakesFlagsOfOtherServers) {
  EXPECT_EQ(arguments("parallel: 3\ntrust-remote-code: true\ncuda-graph-bs: [1, 2]\npp: 1\n"),
            "--max-num-seqs=3");
  EXPECT_EQ(arguments("parallel: 3\n", {"--max-num-seqs", "9"}), "");
  EXPECT_EQ(arguments("max-num-seqs: 1\nparallel: 2\n"),
            "FILE:2: parallel is set by line 1 already");
  EXPECT_EQ(arguments("port: 1\nenable-lora: true\n"),
            "FILE:2: --enable-lora asks for what is not there: adapters (LoRA) are not served");
  EXPECT_EQ(arguments("enable-lora: false\n"), "");
}

TEST_F(ConfigFile, ErrorsNameFileLineAndTheNearestFlag) {
  EXPECT_EQ(arguments("host: a\n\nmax-num-sqes: 3\n"),
            "FILE:3: fathom serve has no flag \"max-num-sqes\" for a file; did you mean "
            "max-num-seqs?");
  EXPECT_EQ(arguments("entirely-different-thing: 3\n"),
            "FILE:1: fathom serve has no flag \"entirely-different-thing\" for a file");
  for (const char* name : {"config", "help"}) {
    EXPECT_EQ(arguments(std::string(name) + ": x\n"),
              "FILE:1: fathom serve has no flag \"" + std::string(name) + "\" for a file");
  }
  EXPECT_EQ(arguments("p: 3\n"), "FILE:1: fathom serve has no flag \"p\" for a file");
  EXPECT_EQ(arguments("max-num-seqs: 1\nhost: b\nmax_running_requests: 2\n"),
            "FILE:3: max-running-requests is set by line 1 already");
  EXPECT_EQ(arguments("port: 1\nport: 2\n"), "FILE:2: port is set by line 1 already");
  EXPECT_EQ(arguments("host: a\nport: [1, 2]\n"), "FILE:2: port takes one value, not a list");
  EXPECT_EQ(arguments("port:\n"), "FILE:1: port is neither a value nor a list of values");
  EXPECT_EQ(arguments("host: {a: b}\n"), "FILE:1: host is neither a value nor a list of values");
  EXPECT_EQ(arguments("served-model-name: [a, [b]]\n"),
            "FILE:1: served-model-name is neither a value nor a list of values");
  EXPECT_EQ(arguments("[a]: b\n"), "FILE:1: expected \"flag: value\"");
  EXPECT_EQ(arguments("- a\n"), "FILE:1: expected \"flag: value\"");
  EXPECT_EQ(arguments("a: 1\n---\nb: 2\n"), "FILE: has more than one document");
  EXPECT_TRUE(arguments("host: a\nport: [1\n").starts_with("FILE:3: "));
  EXPECT_NE(arguments(std::string(100'000, '[')).find("FILE:1: "), std::string::npos);
  EXPECT_NE(arguments(std::string((1 << 20) + 1, '#')).find("1048576"), std::string::npos);
  EXPECT_FALSE(read_config_file("/nonexistent.yaml").has_value());
}

TEST_F(ConfigFile, ValuesAreCheckedAsOnTheCommandLine) {
  const auto message_of = [&](const std::string& text) {
    write(text);
    testing::internal::CaptureStderr();
    const char* const arguments[] = {"fathom", "serve", "--config", path_.c_str()};
    EXPECT_EQ(run_command_line(4, arguments), kExitBadInput);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(message_of("port: 70000\n"),
            "fathom: " + path_ + ":1: --port is 70000, allowed are 0 to 65535\n");
  EXPECT_EQ(message_of("model: /nonexistent/model\nport: 0\npp: 8\n"),
            "fathom: " + path_ +
                ":3: --pp is \"8\", allowed is 1: parallelism over devices is not "
                "there yet\n");
  EXPECT_EQ(message_of("prot: 1\n"), "fathom: " + path_ +
                                         ":1: fathom serve has no flag \"prot\" for a file; did "
                                         "you mean port?\n");
}

}  // namespace
}  // namespace fathom
