#include "cli/flags.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "cli/command_line.h"
#include "cli/flag_sources.h"
#include "cli/model_flags.h"
#include "engine/gpu_runner.h"

namespace fathom {
namespace {

TEST(ParseCount, ReadsSuffixesAsVllmDoes) {
  EXPECT_EQ(*parse_count("0"), 0);
  EXPECT_EQ(*parse_count("-1"), -1);
  EXPECT_EQ(*parse_count("4096"), 4096);
  EXPECT_EQ(*parse_count("4k"), 4000);
  EXPECT_EQ(*parse_count("4K"), 4096);
  EXPECT_EQ(*parse_count("1m"), 1000000);
  EXPECT_EQ(*parse_count("1M"), 1048576);
  EXPECT_EQ(*parse_count("2g"), 2000000000);
  EXPECT_EQ(*parse_count("2G"), int64_t{1} << 31);
  EXPECT_EQ(*parse_count("25.6k"), 25600);
  for (const char* bad : {"", "k", "1.5", "1.5K", "1kk", "1 k", "0x10", "1e3", "one", "nan", "infk",
                          "99999999999999999999", "9999999999G", "1e300k", "--1"}) {
    EXPECT_FALSE(parse_count(bad).has_value()) << bad;
  }
}

TEST(ParseNumber, TakesFiniteNumbersOnly) {
  EXPECT_EQ(*parse_number("0.5"), 0.5);
  EXPECT_EQ(*parse_number("-1e-3"), -1e-3);
  for (const char* bad : {"", "x", "0.5x", "nan", "inf", "-inf", "1e999", " 1"}) {
    EXPECT_FALSE(parse_number(bad).has_value()) << bad;
  }
}

TEST(ParseTokenList, ReadsIds) {
  EXPECT_EQ(*parse_token_list("1,2, 3\n"), (std::vector<int32_t>{1, 2, 3}));
  for (const char* bad : {"", ",", "1,", "1,,2", "-1", "1 2", "2147483648", "a"}) {
    EXPECT_FALSE(parse_token_list(bad).has_value()) << bad;
  }
}

TEST(NearestWord, ForgivesAFewLettersOnly) {
  const std::vector<std::string> flags = {"--max-model-len", "--max-num-seqs", "--seed"};
  EXPECT_EQ(nearest_word("--max-moedl-len", flags), "--max-model-len");
  EXPECT_EQ(nearest_word("--max_num_seqs", flags), "--max-num-seqs");
  EXPECT_EQ(nearest_word("--sed", flags), "--seed");
  EXPECT_FALSE(nearest_word("--tensor-parallel-size", flags).has_value());
  EXPECT_FALSE(nearest_word(std::string(100000, 'x'), flags).has_value());
}

// A command with all flags, parsed as in main().
struct Parsed {
  ModelFlags flags;
  std::string error;
};

Parsed parse(std::vector<std::string> arguments) {
  Parsed parsed;
  CLI::App app;
  add_model_positional(app, &parsed.flags);
  add_model_flags(app, &parsed.flags);
  std::reverse(arguments.begin(), arguments.end());
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& problem) {
    parsed.error = problem.what();
  }
  return parsed;
}

TEST(ModelFlags, ReadsNamesAndAliases) {
  const Parsed parsed = parse({"m", "--max-model-len", "8k", "--max-running-requests", "7",
                               "--chunked-prefill-size=512", "--dtype", "float32", "-t", "3"});
  EXPECT_EQ(parsed.error, "");
  EXPECT_EQ(parsed.flags.model, "m");
  EXPECT_EQ(parsed.flags.max_model_len, 8000);
  EXPECT_EQ(parsed.flags.max_num_seqs, 7);
  EXPECT_EQ(parsed.flags.max_batched_tokens, 512);
  EXPECT_EQ(parsed.flags.compute(), DType::kF32);
  EXPECT_EQ(parsed.flags.cache_format(), CacheFormat::kF32);
  EXPECT_EQ(parsed.flags.threads, 3);
  EXPECT_EQ(parse({}).flags.compute(), DType::kBF16);
  EXPECT_EQ(parse({}).flags.cache_format(), CacheFormat::kBF16);
  EXPECT_EQ(parse({"--model-path", "x"}).flags.model, "x");
}

TEST(ModelFlags, ExpertsAreParallelByTwoNames) {
  for (const auto& line : {std::vector<std::string>{"--dp", "4", "--enable-expert-parallel"},
                           std::vector<std::string>{"--dp", "4", "--ep-size", "4"}}) {
    const Parsed parsed = parse(line);
    EXPECT_EQ(parsed.error, "");
    EXPECT_TRUE(parsed.flags.check_ranks());
    EXPECT_TRUE(parsed.flags.placement().exchanges_tokens());
  }
  EXPECT_FALSE(parse({"--dp", "4"}).flags.placement().exchanges_tokens());
  EXPECT_FALSE(parse({"--enable-expert-parallel"}).flags.placement().exchanges_tokens());
  EXPECT_EQ(parse({"--ep-num-redundant-experts", "3"}).flags.placement().redundant_experts, 3);

  const auto refusal = [](const std::vector<std::string>& arguments) {
    const auto checked = parse(arguments).flags.check_ranks();
    return checked ? "" : checked.error().message;
  };
  EXPECT_EQ(refusal({"--tp", "2", "--dp", "2", "--ep-size", "2"}),
            "--ep-size is 2, allowed are 1 and the number of all ranks, 4");
  EXPECT_EQ(refusal({"--dp", "2", "--enable-eplb"}),
            "--enable-eplb needs --enable-expert-parallel and more than one rank");
  EXPECT_EQ(refusal({"--dp", "2", "--overlap-expert-exchange"}),
            "--overlap-expert-exchange needs --enable-expert-parallel and more than one rank");
  EXPECT_EQ(refusal({"--enable-expert-parallel", "--init-expert-location", "x.json"}),
            "--init-expert-location x.json needs --enable-expert-parallel and more than one rank");
}

TEST(ModelFlags, GpusHaveExpertsInOnePlace) {
  const auto refusal = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--dp", "2", "--enable-expert-parallel"});
    const auto gpus = parse(arguments).flags.gpus();
    return gpus ? "" : gpus.error().message;
  };
  const std::vector<std::string> gpus = {"--device", "cuda:0,cuda:0"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), gpus.begin(), gpus.end());
    return refusal(more);
  };
  EXPECT_EQ(with({"--enable-eplb"}),
            "--device cuda:0,cuda:0: experts move between ranks (--enable-eplb) on the CPU only, "
            "so far");
  EXPECT_EQ(with({"--num-redundant-experts", "2"}),
            "--device cuda:0,cuda:0: copies of experts (--num-redundant-experts) are there on the "
            "CPU only, so far");
  EXPECT_EQ(with({}).find("so far"), std::string::npos);
}

TEST(ModelFlags, EveryCacheNameIsAFormat) {
  EXPECT_EQ(parse({"--kv-cache-dtype", "fp8"}).flags.cache_format(), CacheFormat::kFp8Scaled);
  EXPECT_EQ(parse({"--kv-cache-dtype", "fp8_e4m3"}).flags.cache_format(), CacheFormat::kE4M3);
  EXPECT_EQ(parse({"--kv-cache-dtype", "fp8_e5m2"}).flags.cache_format(), CacheFormat::kE5M2);
  EXPECT_EQ(parse({"--kv-cache-dtype", "bf16"}).flags.cache_format(), CacheFormat::kBF16);
  EXPECT_EQ(parse({"--kv-cache-dtype", "f32"}).flags.cache_format(), CacheFormat::kF32);
}

TEST(ModelFlags, ErrorsNameFlagValueAndLimits) {
  EXPECT_EQ(parse({"--threads", "0"}).error, "--threads is 0, allowed are 1 to 1024");
  EXPECT_EQ(parse({"--dtype", "fp7"}).error,
            "--dtype is \"fp7\", allowed are auto, bfloat16, float32");
  EXPECT_EQ(parse({"--seed", "-1"}).error, "--seed is -1, the least allowed is 0");
  EXPECT_EQ(parse({"--max-model-len", "8q"}).error,
            "--max-model-len is \"8q\", expected a whole number, possibly with k, K, m, M, g or G");
}

TEST(ModelFlags, TheEnvironmentCountsUnlessAFlagDoes) {
  setenv("FATHOM_MAX_NUM_SEQS", "5", 1);
  EXPECT_EQ(parse({}).flags.max_num_seqs, 5);
  EXPECT_EQ(parse({"--max-num-seqs", "6"}).flags.max_num_seqs, 6);
  setenv("FATHOM_MAX_NUM_SEQS", "none", 1);
  EXPECT_NE(parse({}).error, "");
  unsetenv("FATHOM_MAX_NUM_SEQS");
}

TEST(ModelFlags, PrefixCachingIsOnOffOrNotSaid) {
  EXPECT_FALSE(parse({}).flags.prefix_caching.has_value());
  EXPECT_EQ(parse({"--enable-prefix-caching"}).flags.prefix_caching, true);
  EXPECT_EQ(parse({"--no-enable-prefix-caching"}).flags.prefix_caching, false);
  EXPECT_EQ(parse({"--disable-radix-cache"}).flags.prefix_caching, false);
  setenv("FATHOM_ENABLE_PREFIX_CACHING", "false", 1);
  EXPECT_EQ(parse({}).flags.prefix_caching, false);
  unsetenv("FATHOM_ENABLE_PREFIX_CACHING");
  const Parsed parsed = parse({"--kv-offload-gib", "3", "--kv-offload-dir", "/tmp/pages"});
  EXPECT_EQ(parsed.flags.kv_offload_gib, 3);
  EXPECT_EQ(parsed.flags.kv_offload_dir, "/tmp/pages");
  EXPECT_EQ(parse({"--kv-offload-gib", "-1"}).error,
            "--kv-offload-gib is -1, allowed are 0 to 1048576");
}

TEST(ModelFlags, AWordThatIsNoModelMayBeText) {
  EXPECT_TRUE(is_no_model("hello"));
  EXPECT_FALSE(is_no_model(""));
  EXPECT_FALSE(is_no_model("modles/fathom-tiny"));
  EXPECT_FALSE(is_no_model("."));
  setenv("FATHOM_MODEL", "hello", 1);
  EXPECT_FALSE(is_no_model("hello"));
  ModelFlags flags;
  flags.model = "word";
  std::string text;
  testing::internal::CaptureStderr();
  take_word_for_text(&flags, &text);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "fathom: \"word\" is no model here, so it is the text for hello\n");
  EXPECT_EQ(text, "word");
  EXPECT_EQ(flags.model, "hello");
  unsetenv("FATHOM_MODEL");
}

TEST(ModelFlags, TheCpuBesideAGpuIsExplained) {
  if (num_gpus() > 0) GTEST_SKIP() << "there is a GPU";
  namespace fs = std::filesystem;
  const fs::path root = fs::path(testing::TempDir()) / ("fathom-root-" + std::to_string(getpid()));
  fs::create_directories(root / "dev");
  const ModelFlags flags;
  EXPECT_EQ(flags.why_cpu(root.string()), "");
  std::ofstream(root / "dev/nvidiactl") << "";
  const std::string reason = flags.why_cpu(root.string());
  EXPECT_TRUE(reason.starts_with("--device auto takes the CPU: ")) << reason;
  EXPECT_GT(reason.size(), 40u);
  ModelFlags cpu;
  cpu.device = "cpu";
  EXPECT_EQ(cpu.why_cpu(root.string()), "");
  fs::remove_all(root);
}

// Uses fake GPUs; the machine needs none.
TEST(ModelFlags, AutoTakesGpusForWhatTheyHave) {
  const std::string goldens = std::string(FATHOM_SOURCE_DIR) + "/tests/goldens/";
  const auto why = [&](const std::string& model, std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"-m", goldens + model});
    const ModelFlags flags = parse(more).flags;
    EXPECT_EQ(flags.gpus_among(2)->empty(), !flags.why_not_on(2).empty());
    EXPECT_TRUE(flags.gpus_among(0)->empty());
    EXPECT_EQ(flags.why_not_on(0), "");
    return flags.why_not_on(2);
  };
  EXPECT_EQ(why("v3"), "");
  EXPECT_EQ(why("v3", {"--tp", "2"}), "");
  EXPECT_TRUE(why("v3", {"--tp", "3"}).starts_with("3 ranks, and 2 GPUs")) << why("v3");
  EXPECT_EQ(why("no-such-model"), "");  // opening it says what is wrong
  const std::string sparse =
      "sparse attention of this shape is there on the CPU only, so far: config.json: kv_lora_rank "
      "is 48; kernels for GPUs take 512 only";
  EXPECT_EQ(why("v32"), sparse);
  EXPECT_EQ(why("v32", {"--load-format", "dummy"}), sparse);
  const std::string small = "../data/configs/v32_small";
  EXPECT_EQ(why(small, {"--load-format", "dummy", "--tp", "2"}), "");
  EXPECT_EQ(why(small, {"--load-format", "dummy", "--tp", "2", "--enable-expert-parallel"}), "");
  const auto cuda = parse({"-m", goldens + "v32", "--device", "cuda"}).flags.gpus_among(1);
  ASSERT_FALSE(cuda);
  EXPECT_EQ(cuda.error().message, "--device cuda: " + sparse);
}

TEST(ModelFlags, TextIsNotTakenForAModel) {
  const auto taken = [](const std::string& argument) {
    ModelFlags flags;
    flags.model = argument;
    std::string text;
    take_text_for_model(&flags, &text);
    EXPECT_EQ(text.empty(), flags.model == argument);
    return !text.empty();
  };
  EXPECT_TRUE(taken("What is 2 + 2?"));
  EXPECT_TRUE(taken("1,2,3"));
  EXPECT_TRUE(taken("-"));
  EXPECT_FALSE(taken("deepseek-ai/DeepSeek-V3"));
  EXPECT_FALSE(taken("modles/fathom-tiny"));
}

// Runs the whole command line, up to loading a model.
// On the CPU, on a machine with a GPU too.
int status_of(std::vector<const char*> arguments, std::string* message) {
  arguments.insert(arguments.begin(), "fathom");
  setenv("FATHOM_DEVICE", "cpu", 1);
  testing::internal::CaptureStderr();
  testing::internal::CaptureStdout();
  const int status = run_command_line(static_cast<int>(arguments.size()), arguments.data());
  *message = testing::internal::GetCapturedStderr();
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
  unsetenv("FATHOM_DEVICE");
  return status;
}

TEST(CommandLine, BadInputIsOneLineAndStatusTwo) {
  const std::vector<std::pair<std::vector<const char*>, std::string>> cases = {
      {{"rnu"}, "did you mean run?"},
      {{"run", "--max-moedl-len", "4", "x y"}, "did you mean --max-model-len?"},
      {{"run", "m", "two", "words"}, "needs quotes"},
      {{"run", "--temperature", "2.5", "x y"}, "--temperature is 2.5, allowed are 0 to 2"},
      {{"run", "--seed"}, "--seed needs one value"},
      {{"run", "--ids", "1,x"}, "\"x\""},
      {{"run", "--ids", "1", "-p", "x"}, "exclude"},
      {{"run", "/nonexistent/model", "x"}, "/nonexistent/model"},
      {{"run", "-p", "x", "--num-hidden-layers", "2"}, "--load-format dummy"},
      {{"run", "-p", "x", "--chat-format", "nonsense", "-q"}, "nonsense"},
      {{"run", "-p", "x", "--max-model-len", "1M", "-q"}, "--max-model-len is 1048576"},
      {{"run", "-p", "x", "--max-num-seqs", "4096", "-q"}, "--max-num-seqs is 4096"},
      {{"inspect", "/nonexistent/model"}, "/nonexistent/model"},
      {{"tokenize", "--decode", "8192"}, "outside the vocabulary"},
      {{"eval", "--set", "/nonexistent.jsonl"}, "/nonexistent.jsonl"},
      {{"bench", "latncy"}, "did you mean latency?"},
  };
  for (const auto& [arguments, part] : cases) {
    std::string message;
    EXPECT_EQ(status_of(arguments, &message), kExitBadInput) << message;
    EXPECT_TRUE(message.starts_with("fathom: ")) << message;
    EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), 1) << message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
}

TEST(CommandLine, ABadValueIsSaidToComeFromWhereItDoes) {
  const std::string path = testing::TempDir() + "fathom-flags-" + std::to_string(getpid());
  std::ofstream(path) << "port: 1\n\nmax-num-seqs: x\n";
  std::string message;
  EXPECT_EQ(status_of({"serve", "--config", path.c_str()}, &message), kExitBadInput);
  EXPECT_TRUE(message.starts_with("fathom: " + path + ":3: --max-num-seqs is \"x\", ")) << message;
  setenv("FATHOM_MAX_NUM_SEQS", "y", 1);  // takes precedence over the file
  EXPECT_EQ(status_of({"serve", "--config", path.c_str()}, &message), kExitBadInput);
  EXPECT_TRUE(message.starts_with("fathom: FATHOM_MAX_NUM_SEQS: --max-num-seqs is \"y\", "))
      << message;
  EXPECT_EQ(status_of({"serve", "--max-num-seqs", "z"}, &message), kExitBadInput);
  EXPECT_TRUE(message.starts_with("fathom: --max-num-seqs is \"z\", ")) << message;
  unsetenv("FATHOM_MAX_NUM_SEQS");
  std::ofstream(path, std::ios::trunc) << "pipeline-parallel-size: 8\n";
  EXPECT_EQ(status_of({"serve", "--config", path.c_str()}, &message), kExitBadInput);
  EXPECT_TRUE(message.starts_with("fathom: " + path + ":1: --pipeline-parallel-size is \"8\", "))
      << message;
  // An error that the command finds after parsing.
  setenv("FATHOM_MAX_MODEL_LEN", "1M", 1);
  EXPECT_EQ(status_of({"run", "-q", "-p", "x"}, &message), kExitBadInput);
  EXPECT_TRUE(message.starts_with("fathom: FATHOM_MAX_MODEL_LEN: --max-model-len is 1048576"))
      << message;
  unsetenv("FATHOM_MAX_MODEL_LEN");
  setenv("FATHOM_QUIET", "maybe", 1);
  EXPECT_EQ(status_of({"run", "-p", "x"}, &message), kExitBadInput);
  EXPECT_EQ(message, "fathom: FATHOM_QUIET: --quiet is \"maybe\", allowed are true and false\n");
  unsetenv("FATHOM_QUIET");
  unlink(path.c_str());
}

TEST(CommandLine, AMisspeltVariableIsWarnedOf) {
  CLI::App app;
  ModelFlags flags;
  add_model_flags(*app.add_subcommand("run"), &flags);
  setenv("FATHOM_MAX_NUM_SEQ", "1", 1);
  setenv("FATHOM_MAX_LEN", "1", 1);
  setenv("FATHOM_ELSEWHERE_1", "1", 1);
  setenv("FATHOM_CPU_ISA", "avx2", 1);
  EXPECT_EQ(misspelt_variables(app),
            (std::vector<std::string>{
                "FATHOM_MAX_LEN is set and no flag has it; did you mean FATHOM_MAX_MODEL_LEN?",
                "FATHOM_MAX_NUM_SEQ is set and no flag has it; did you mean "
                "FATHOM_MAX_NUM_SEQS?"}));
  for (const char* name :
       {"FATHOM_MAX_NUM_SEQ", "FATHOM_MAX_LEN", "FATHOM_ELSEWHERE_1", "FATHOM_CPU_ISA"}) {
    unsetenv(name);
  }
  EXPECT_TRUE(misspelt_variables(app).empty());
}

TEST(CommandLine, EachCommandNamesItself) {
  std::string message;
  EXPECT_EQ(status_of({"bench"}, &message), kExitBadInput);
  EXPECT_NE(message.find("Usage: fathom bench "), std::string::npos) << message;
  EXPECT_NE(message.find("fathom: fathom bench needs a command\n"), std::string::npos) << message;
  EXPECT_EQ(status_of({}, &message), kExitBadInput);
  EXPECT_NE(message.find("Usage: fathom "), std::string::npos) << message;
  EXPECT_NE(message.find("fathom: fathom needs a command\n"), std::string::npos) << message;
  const auto help_of = [](std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "fathom");
    testing::internal::CaptureStdout();
    EXPECT_EQ(run_command_line(static_cast<int>(arguments.size()), arguments.data()), 0);
    return testing::internal::GetCapturedStdout();
  };
  EXPECT_EQ(help_of({"help"}), help_of({"--help"}));
  EXPECT_EQ(help_of({"help", "bench", "serve"}), help_of({"bench", "serve", "--help"}));
  EXPECT_NE(help_of({"help", "bench", "serve"}).find("Usage: fathom bench serve "),
            std::string::npos);
  EXPECT_EQ(help_of({"-v"}), help_of({"--version"}));
}

// README's table and --help list the same commands.
TEST(CommandLine, HelpListsTheCommandsOfTheReadme) {
  testing::internal::CaptureStdout();
  const char* arguments[] = {"fathom", "--help"};
  EXPECT_EQ(run_command_line(2, arguments), 0);
  const std::string help = testing::internal::GetCapturedStdout();
  std::ifstream readme(std::string(FATHOM_SOURCE_DIR) + "/README.md");
  const std::regex cell("`fathom ([a-z]+( (latency|throughput|serve))?)[^`]*`");
  std::set<std::string> commands;
  for (std::string line; std::getline(readme, line);) {
    if (!line.starts_with("| `fathom ")) continue;
    line = line.substr(0, line.find(" | ", 3));
    for (std::sregex_iterator at(line.begin(), line.end(), cell), end; at != end; ++at) {
      commands.insert((*at)[1]);
    }
  }
  EXPECT_GE(commands.size(), 11u);
  std::set<std::string> listed;
  std::istringstream lines(help.substr(help.find("Subcommands:\n")));
  std::string line;
  std::getline(lines, line);
  while (std::getline(lines, line) && !line.empty()) {
    listed.insert(line.substr(2, line.find("  ", 2) - 2));
  }
  EXPECT_EQ(listed, commands);
}

TEST(CommandLine, ControlCharactersAreShownNotObeyed) {
  std::string message;
  EXPECT_EQ(status_of({"inspect", "/none\x1b[31m\nfathom: ok"}, &message), kExitBadInput);
  EXPECT_EQ(message.find('\x1b'), std::string::npos);
  EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), 1);
}

}  // namespace
}  // namespace fathom
