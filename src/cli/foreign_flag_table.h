// The flags of vLLM's, SGLang's and llama.cpp's servers that `fathom serve` does not have itself,
// in groups of one meaning: data for foreign_flags.cc.
//
// Names are those of `vllm serve` 0.33.0, SGLang's launch_server 0.5.23 and llama-server (its
// README of 2026), and older ones that launch lines still have; tests/data/launch_flags lists them.
#pragma once

#include <span>
#include <string_view>

namespace fathom {

enum class Asked {
  kNote,     // changes nothing here: one line says so
  kOnly,     // the values of `argument` hold here anyway; any other is refused
  kRefused,  // asks for what is not there
  kAlias,    // `argument` is the flag's name here, or flag and value
};

// Names have a space between, long ones without their dashes: "ctx-size", "-c". A name of
// `switches` stands for its "no-" form too.
struct ForeignGroup {
  Asked asked;
  std::string_view argument;
  std::string_view reason;  // what holds here
  std::string_view switches;
  std::string_view values;             // take one value
  std::string_view lists = "";         // take one or more
  std::string_view maybe_values = "";  // take none or one
};

// Of `fathom serve`, and of `fathom bench serve`: those of `vllm bench serve` and of SGLang's
// bench_serving.
std::span<const ForeignGroup> server_groups();
std::span<const ForeignGroup> load_groups();

}  // namespace fathom
