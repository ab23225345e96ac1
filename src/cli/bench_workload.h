// What a load generator sends and when: made-up prompts, conversations of a file, and the recorded
// traffic of two services.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace fathom {

struct LoadRequest {
  double at_seconds = 0;  // after the start
  // One of the two: token ids, or a text.
  std::vector<int32_t> prompt_ids;
  std::string prompt_text;
  int64_t output_tokens = 1;
  bool cancelled = false;  // its client leaves before the end, if there is time
};

struct WorkloadOptions {
  std::string dataset = "random";  // prefix_repetition, custom, sharegpt, azure, mooncake
  std::string path = {};           // of the file; none for random
  int64_t num_prompts = 1000;      // at most
  int64_t vocab_size = 0;          // ids are below it
  uint64_t seed = 0;

  int64_t random_input_len = 1024, random_output_len = 128;  // the latter of custom prompts, too
  int64_t random_prefix_len = 0;  // tokens that all random prompts begin with
  double range_ratio = 0;
  // Of prefix_repetition: num_prompts / num_prefixes prompts begin with each prefix.
  int64_t prefix_len = 256, suffix_len = 256, num_prefixes = 10, repetition_output_len = 128;
  int64_t sharegpt_output_len = 0;  // 0: a token for four bytes of the recorded answer

  // Requests a second, 0: all at once, or at a trace's own times. Gaps are gamma-distributed with
  // this shape: 1 is a Poisson process, less comes in bursts, more is steadier.
  double request_rate = 0;
  double burstiness = 1;
  double time_scale = 1;    // times a trace's arrival times; 0.5 is twice as fast
  double length_scale = 1;  // times a trace's lengths, its shared blocks included
  double cancel_rate = 0;   // share of the requests
};

// In the order of their times. Azure: a CSV of TIMESTAMP,ContextTokens,GeneratedTokens. Mooncake: a
// .jsonl of timestamp (ms), input_length, output_length and hash_ids, one for every 512 tokens of
// the prompt: equal ids become equal tokens. ShareGPT: a JSON array of objects with
// "conversations", of which the first question is asked. Custom: the "prompt" strings of a .jsonl,
// or a text's lines. Errors name the file and its line or item.
Result<std::vector<LoadRequest>> make_workload(const WorkloadOptions& options);

}  // namespace fathom
