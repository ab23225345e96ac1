#include "cli/foreign_flags.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <iterator>
#include <sstream>

#include "cli/command.h"

namespace fathom {
namespace {

// Parses `fathom serve` with a translated launch line.
struct Outcome {
  std::vector<std::string> arguments, notes;
  std::string error;
  CLI::App app;
  Action chosen;
  CLI::App* serve = nullptr;

  std::string value(const std::string& flag) const {
    const CLI::Option* option = serve->get_option_no_throw(flag);
    return option == nullptr || option->count() == 0 ? "" : option->results().back();
  }
};

std::unique_ptr<Outcome> launch(const std::vector<std::string>& words) {
  auto outcome = std::make_unique<Outcome>();
  add_serve_command(outcome->app, &outcome->chosen);
  outcome->serve = outcome->app.get_subcommand("serve");
  auto line = translate_launch_line(*outcome->serve, words);
  if (!line) {
    outcome->error = line.error().message;
    return outcome;
  }
  outcome->arguments = line->arguments;
  outcome->notes = line->notes;
  std::vector<std::string> reversed(line->arguments.rbegin(), line->arguments.rend());
  reversed.push_back("serve");
  try {
    outcome->app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
  } catch (const CLI::ParseError& problem) {
    outcome->error = problem.what();
  }
  return outcome;
}

std::unique_ptr<Outcome> launch(const std::string& line) {
  std::istringstream words(line);
  return launch(std::vector<std::string>{std::istream_iterator<std::string>(words), {}});
}

TEST(ForeignFlags, AreNotedInOneLineEach) {
  const auto outcome = launch("m --trust-remote-code --mem-fraction-static 0.8");
  EXPECT_EQ(outcome->error, "");
  EXPECT_EQ(outcome->notes,
            (std::vector<std::string>{
                "--trust-remote-code has no effect: no code of a checkpoint is ever run",
                "--mem-fraction-static has no effect: --max-total-tokens sets the size of the "
                "cache"}));
  EXPECT_EQ(outcome->arguments, std::vector<std::string>{"m"});
  EXPECT_TRUE(launch("m")->notes.empty());
  EXPECT_TRUE(launch("m --trust-remote-code=false")->notes.empty());
}

TEST(ForeignFlags, LaunchLinesOfOtherServersAreTaken) {
  for (const char* line :
       {"m --trust-remote-code --enable-torch-compile --torch-compile-max-bs 8 "
        "--attention-backend flashinfer --mem-fraction-static 0.9 --tp 1 --page-size 64 "
        "--cuda-graph-max-bs 8 --enable-metrics --schedule-policy lpm --enable-cache-report",
        "m --gpu-memory-utilization 0.95 --tensor-parallel-size 1 --block-size 64 --swap-space 4 "
        "--trust-remote-code --reasoning-parser deepseek_r1 --tool-call-parser deepseek_v3 "
        "--enable-auto-tool-choice --uvicorn-log-level warning --enable-chunked-prefill "
        "--disable-log-stats --pipeline-parallel-size 1",
        "--model m --dtype half --random-seed 3 --revision main --tokenizer m --download-dir /x "
        "--generation-config auto --max-log-len 10 --max-logprobs 20 --root-path /llm "
        "--disable-custom-all-reduce --async-scheduling --disable-uvicorn-access-log "
        "--log-level-http warning --skip-server-warmup --max-prefill-tokens 8192 "
        "--cuda-graph-bs 1 2 4 8 --disable-overlap-schedule --decode-log-interval 40 "
        "--enable-nan-detection --sampling-backend flashinfer"}) {
    const auto outcome = launch(line);
    EXPECT_EQ(outcome->error, "");
    EXPECT_EQ(outcome->value("--model"), "m");
    for (const std::string& note : outcome->notes) {
      EXPECT_NE(note.find(" has no effect: "), std::string::npos) << note;
      EXPECT_EQ(note.find('\n'), std::string::npos);
    }
    EXPECT_GE(outcome->notes.size(), 9u);
  }
}

TEST(ForeignFlags, WhatHasAMeaningIsHonoured) {
  const auto llama = launch("-m m -c 4096 -np 3 -a one,two -ngl 99 -fa on -b 512 --temp 0.6 -s 7");
  EXPECT_EQ(llama->error, "");
  EXPECT_EQ(llama->value("--max-model-len"), "4096");
  EXPECT_EQ(llama->value("--max-num-seqs"), "3");
  EXPECT_EQ(llama->serve->get_option("--served-model-name")->results(),
            (std::vector<std::string>{"one", "two"}));
  EXPECT_EQ(llama->value("--max-num-batched-tokens"), "512");
  EXPECT_EQ(llama->value("--temperature"), "0.6");
  EXPECT_EQ(llama->value("--seed"), "7");
  EXPECT_EQ(llama->notes.size(), 2u);  // for -ngl and -fa
  EXPECT_EQ(launch("m -ngl 0")->value("--device"), "cpu");
  EXPECT_EQ(launch("m --dtype bf16")->value("--dtype"), "bfloat16");
  EXPECT_EQ(launch("m --dtype float16")->value("--dtype"), "bfloat16");
  EXPECT_EQ(launch("m --dtype float16")->notes.size(), 1u);
  EXPECT_EQ(launch("m --dtype=float")->value("--dtype"), "float32");
  EXPECT_EQ(launch("m --random-seed 5")->value("--seed"), "5");
  EXPECT_EQ(launch("m --generation-config vllm")->value("--sampling-defaults"), "openai");
  const auto folder = launch("m --generation-config /elsewhere");
  EXPECT_EQ(folder->error, "");
  EXPECT_EQ(folder->notes,
            (std::vector<std::string>{"--generation-config /elsewhere has no effect: MODEL's "
                                      "generation_config.json is read"}));
  EXPECT_EQ(launch("m --generation-config m")->notes.size(), 0u);
  EXPECT_EQ(launch("--generation-config m --model m")->notes.size(), 0u);
  EXPECT_EQ(launch("m --skip-server-warmup")->notes,
            (std::vector<std::string>{
                "--skip-server-warmup has no effect: no warm-up requests are sent"}));
  EXPECT_EQ(launch("m -q fp8")->value("--quantization"), "fp8");
  EXPECT_EQ(launch("-q m")->value("--model"), "m");
  EXPECT_EQ(launch("m --no-enforce-eager")->error, "");
  EXPECT_EQ(launch("m --max_model_len 16")->value("--max-model-len"), "16");
  EXPECT_EQ(launch("m --compilation-config.level 3")->notes.size(), 1u);
  for (const char* usual : {"--max-model-len auto", "--ctx-size 0", "--parallel -1", "--seed -1",
                            "--threads -1", "--load-format safetensors"}) {
    EXPECT_EQ(launch(std::string("m ") + usual)->error, "") << usual;
  }
}

TEST(ForeignFlags, ListsEndWhereTheModelBegins) {
  EXPECT_EQ(launch("--cuda-graph-bs 1 2 4 m")->value("--model"), "m");
  const auto names = launch("m --served-model-name a b --port 1");
  EXPECT_EQ(names->error, "");
  EXPECT_EQ(names->serve->get_option("--served-model-name")->results(),
            (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(launch("--served-model-name a m")->value("--model"), "m");
  const auto origins = launch({"m", "--allowed-origins", R"(["https://a", "https://b"])"});
  EXPECT_EQ(origins->serve->get_option("--allowed-origins")->results(),
            (std::vector<std::string>{"https://a", "https://b"}));
}

TEST(ForeignFlags, LoadGeneratorsLinesAreTaken) {
  CLI::App app;
  Action chosen;
  add_bench_command(app, &chosen);
  const CLI::App& serve = *app.get_subcommand("bench")->get_subcommand("serve");
  const auto arguments = [&](const std::string& text, size_t notes) {
    std::istringstream stream(text);
    const std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
    const auto line = translate_launch_line(serve, words);
    EXPECT_TRUE(line) << line.error().message;
    if (!line) return std::string();
    EXPECT_EQ(line->notes.size(), notes) << text;
    std::vector<std::string> reversed(line->arguments.rbegin(), line->arguments.rend());
    reversed.insert(reversed.end(), {"serve", "bench"});
    CLI::App fresh;
    add_bench_command(fresh, &chosen);
    EXPECT_NO_THROW(fresh.parse(reversed)) << text;
    std::string joined;
    for (const std::string& word : line->arguments) joined += (joined.empty() ? "" : " ") + word;
    return joined;
  };
  EXPECT_EQ(arguments("--backend vllm --model m --tokenizer m --trust-remote-code --num-warmups 2 "
                      "--disable-tqdm --dataset-name prefix_repetition "
                      "--prefix-repetition-prefix-len 512 --prefix-repetition-num-prefixes 4 "
                      "--goodput ttft:200 tpot:50 --percentile-metrics ttft --save-detailed",
                      3),
            "--backend=vllm --model=m --num-warmups=2 --quiet --dataset-name=prefix_repetition "
            "--prefix-repetition-prefix-len=512 --prefix-repetition-num-prefixes=4 "
            "--goodput=ttft:200 --goodput=tpot:50 --percentile-metrics=ttft");
  EXPECT_EQ(
      arguments("--backend sglang-oai --warmup-requests 1 --output-file x.jsonl --flush-cache "
                "--dataset-name random-ids --disable-ignore-eos",
                0),
      "--backend=sglang-oai --num-warmups=1 --result-filename=x.jsonl --flush-cache "
      "--dataset-name=random --ignore-eos=false");
  EXPECT_EQ(translate_launch_line(serve, {"--no-stream"}).error().message,
            "--no-stream asks for what is not there: answers are always streamed");
}

TEST(ForeignFlags, TheTokenizerIsTheModels) {
  EXPECT_EQ(launch("m --tokenizer m")->error, "");
  EXPECT_EQ(launch("--tokenizer-path m/ --model-path m")->error, "");
  EXPECT_EQ(launch("m --tokenizer .")->error,
            "--tokenizer is \".\", allowed is MODEL: a model has its own tokenizer.json");
  const auto of_a_hub = launch("m --tokenizer deepseek-ai/DeepSeek-V3");
  EXPECT_EQ(of_a_hub->error, "");
  EXPECT_EQ(of_a_hub->notes, (std::vector<std::string>{"--tokenizer deepseek-ai/DeepSeek-V3 has no "
                                                       "effect: MODEL's tokenizer.json is read"}));
}

TEST(ForeignFlags, WhatIsNotThereIsRefused) {
  EXPECT_EQ(launch("m --pp 8")->error,
            "--pp is \"8\", allowed is 1: parallelism over devices is not there yet");
  EXPECT_EQ(launch("m --page-size 16")->error,
            "--page-size is \"16\", allowed is 64: pages of the cache have 64 tokens");
  EXPECT_EQ(
      launch("m --master-addr h")->error,
      "--master-addr asks for what is not there: --dist-init-addr HOST:PORT says where node 0 "
      "listens");
  EXPECT_EQ(launch("m --runner pooling")->error,
            "--runner is \"pooling\", allowed are auto, generate: the server generates text, no "
            "embeddings and no scores");
  EXPECT_EQ(launch("m --enable-lora")->error,
            "--enable-lora asks for what is not there: adapters (LoRA) are not served");
  EXPECT_EQ(launch("m --no-enable-lora")->error, "");
  EXPECT_EQ(launch("m --attention-backend")->error, "--attention-backend needs one value");
  EXPECT_EQ(launch("m --attention-backend --port 1")->error, "--attention-backend needs one value");
}

// Each flag of the other servers exists here, has an equivalent, is dropped with a note, or is
// refused with one sentence. None is unknown, and none consumes MODEL as its value.
TEST(ForeignFlags, EveryFlagOfTheOtherServersIsKnown) {
  int flags = 0;
  for (const char* file : {"vllm", "sglang", "llama_server", "older"}) {
    std::ifstream list(std::string(FATHOM_SOURCE_DIR) + "/tests/data/launch_flags/" + file +
                       ".txt");
    ASSERT_TRUE(list.is_open()) << file;
    for (std::string line; std::getline(list, line);) {
      if (line.starts_with('#')) continue;
      const std::string kind = line.substr(0, line.find(' '));
      const std::string flag = line.substr(kind.size() + 1);
      // Flags that the line already contains, and -q, which is --quiet here except before vLLM's
      // methods.
      if (flag == "-q" || flag == "--model" || flag == "--model-path" || flag == "-m" ||
          flag == "--port")
        continue;
      std::vector<std::string> words = {flag};
      if (kind == "value") words.push_back("1");
      words.insert(words.end(), {"--port", "1", "m"});
      // Before MODEL a second word may be MODEL.
      if (kind == "list") words = {"m", flag, "1", "2", "--port", "1"};
      const auto outcome = launch(words);
      ++flags;
      EXPECT_EQ(outcome->error.find("not expected"), std::string::npos) << flag << outcome->error;
      EXPECT_EQ(outcome->error.find('\n'), std::string::npos) << flag << outcome->error;
      EXPECT_LE(outcome->notes.size(), 1u) << flag;
      if (outcome->error.empty()) {
        if (flag != "-h" && flag != "--help") {
          EXPECT_EQ(outcome->value("--model"), "m") << flag;
          EXPECT_EQ(outcome->value("--port"), "1") << flag;
        }
      } else if (!outcome->error.starts_with(flag + " ")) {
        // A flag that exists here under its first name but with other values.
        EXPECT_EQ(outcome->error.substr(0, 2), "--") << flag << outcome->error;
        const bool says_what_is = outcome->error.find("allowed") != std::string::npos ||
                                  outcome->error.find("none of") != std::string::npos;
        EXPECT_TRUE(says_what_is) << flag << outcome->error;
      }
    }
  }
  EXPECT_GE(flags, 1200);
}

}  // namespace
}  // namespace fathom
