// The flags of vLLM's, SGLang's and llama.cpp's servers that `fathom serve` does not have itself,
// grouped by meaning: data for foreign_flags.cc.
//
// The names are those of `vllm serve` 0.33.0, SGLang's launch_server 0.5.23 and llama-server (its
// README of 2026), and older names that launch lines still contain; tests/data/launch_flags lists
// them.
#pragma once

#include <span>
#include <string_view>

namespace fathom {

enum class Asked {
  kNote,     // has no effect here: a note says so
  kOnly,     // the values in `argument` are in effect anyway; others are refused
  kRefused,  // requests a feature that does not exist here
  kAlias,    // `argument` is the equivalent flag, or flag and value
};

// Names are separated by spaces, long ones without dashes: "ctx-size", "-c". A name in `switches`
// also stands for its "no-" form.
struct ForeignGroup {
  Asked asked;
  std::string_view argument;
  std::string_view reason;  // what applies here
  std::string_view switches;
  std::string_view values;             // take exactly one value
  std::string_view lists = "";         // take one or more values
  std::string_view maybe_values = "";  // take at most one value
};

// The groups for `fathom serve`, and for `fathom bench serve`: flags of `vllm bench serve` and
// SGLang's bench_serving.
std::span<const ForeignGroup> server_groups();
std::span<const ForeignGroup> load_groups();

}  // namespace fathom
