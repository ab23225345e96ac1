// Workloads for load generators: random prompts, conversations from a file, and recorded traffic of
// two services.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace fathom {

struct LoadRequest {
  double at_seconds = 0;  // after the start of the run
  // The prompt, as token ids or as text.
  std::vector<int32_t> prompt_ids;
  std::string prompt_text;
  int64_t output_tokens = 1;
  bool cancelled = false;  // the client disconnects before the end, if there is time
};

struct WorkloadOptions {
  std::string dataset = "random";  // prefix_repetition, custom, sharegpt, azure, mooncake
  std::string path = {};           // of the file; empty for random
  int64_t num_prompts = 1000;      // upper limit
  int64_t vocab_size = 0;          // exclusive upper bound of token ids
  uint64_t seed = 0;

  // random_output_len applies to custom prompts too.
  int64_t random_input_len = 1024, random_output_len = 128;
  int64_t random_prefix_len = 0;  // common prefix of all random prompts
  double range_ratio = 0;
  // prefix_repetition: num_prompts / num_prefixes prompts begin with each prefix.
  int64_t prefix_len = 256, suffix_len = 256, num_prefixes = 10, repetition_output_len = 128;
  int64_t sharegpt_output_len = 0;  // 0: one token per four bytes of the recorded output

  // Requests per second; 0: all at once, or at a trace's own times. Gaps are gamma-distributed with
  // the shape `burstiness`: 1 is a Poisson process, less is burstier, more is steadier.
  double request_rate = 0;
  double burstiness = 1;
  double time_scale = 1;    // multiplies a trace's arrival times; 0.5 is twice as fast
  double length_scale = 1;  // multiplies a trace's lengths, including its shared blocks
  double cancel_rate = 0;   // share of requests that are cancelled
};

// Builds a workload, ordered by time. Azure: a CSV of TIMESTAMP,ContextTokens,GeneratedTokens.
// Mooncake: a .jsonl of timestamp (ms), input_length, output_length and hash_ids, one per 512
// tokens of the prompt; equal ids become equal tokens. ShareGPT: a JSON array of objects with
// "conversations", of which the first question is used. Custom: the "prompt" strings of a .jsonl,
// or a text file's lines. Errors name the file and its line or item.
Result<std::vector<LoadRequest>> make_workload(const WorkloadOptions& options);

}  // namespace fathom
