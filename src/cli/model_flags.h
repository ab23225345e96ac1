// The flags that select a model and how it runs, common to all commands that run one.
#pragma once

#include <string>
#include <vector>

#include "cache/latent_layout.h"
#include "checkpoint/model_config.h"
#include "cli/flags.h"
#include "cli/node_flags.h"
#include "cli/speculation_flags.h"
#include "model/attention_plan.h"
#include "placement/placement.h"

namespace fathom {

struct ModelFlags {
  std::string model;  // a directory or a Hugging Face id; empty: the bundled model
  std::string load_format = "auto";
  // With load_format dummy: overrides the number of layers.
  std::optional<int64_t> num_hidden_layers;

  std::string device = "auto";
  std::string dtype = "auto";
  std::string quantization = "auto";
  std::string kv_cache_dtype = "auto";
  std::string attention = "auto";
  // Most keys of a row that attends to all of them, with sparse attention; none: the model's.
  std::optional<int64_t> dense_threshold;
  bool deterministic = false;
  std::string chat_format = "auto";
  std::string chat_template;  // a file or a format's name; empty: use chat_format

  int64_t max_model_len = 0;                  // 0: the model's own, limited by the cache
  std::optional<int64_t> max_num_seqs;        // none: the command's default
  std::optional<int64_t> max_batched_tokens;  // rows per step; none: the device's default
  std::optional<int64_t> max_total_tokens;    // capacity of the cache; none: the command's default
  std::optional<bool> prefix_caching;         // none: the command's default
  int64_t kv_offload_gib = 0;                 // host memory for pages evicted from the cache
  std::string kv_offload_dir;               // files for pages evicted from host memory; empty: none
  int64_t kv_offload_disk_gib = 64;         // total size of the files
  int64_t gpu_step_seconds = 30;            // limit on a GPU's step; 0: none
  int64_t threads = 0;                      // of all ranks together; 0: one per core
  int64_t tp = 1;                           // tensor-parallel ranks of each lane
  int64_t dp = 1;                           // lanes: data-parallel ranks of attention
  bool dp_attention = false;                // tp counts the ranks of all lanes
  bool expert_parallel = false;             // whole experts by rank
  bool overlap_exchange = false;            // exchange of a part of the rows beside another's GEMMs
  int64_t ep_size = 1;                      // 1, or the number of all ranks: expert_parallel
  int64_t redundant_experts = 0;            // of a layer, over all ranks
  std::string expert_location = "trivial";  // or a placement file
  bool eplb = false;                        // experts move when that balances ranks
  int64_t eplb_steps = 1000;                // between two plans
  NodeFlags nodes;
  SpeculationFlags speculation;
  std::optional<int64_t> seed;
  bool quiet = false;

  bool graphs = true;

  bool is_dummy() const { return load_format == "dummy"; }
  DType compute() const;
  CacheFormat cache_format() const;
  AttentionForm attention_form() const;
  // dense_threshold, or what the environment says under SGLang's names; checked against the model,
  // none for one without sparse attention.
  Result<std::optional<int64_t>> dense_keys(const ModelConfig& config) const;
  Result<> check_ranks() const;  // placement() has what the flags say
  Placement placement() const;
  bool has_placement_file() const;  // expert_location names one
  // The GPU of each rank, in order; none: the CPU. "auto" and "cuda" select the first ones, one for
  // each rank, "auto" only if there are so many and they support the model and the other flags.
  Result<std::vector<int>> gpus() const;
  // The same on a machine with `count` usable GPUs.
  Result<std::vector<int>> gpus_among(int count) const;
  // One sentence that says why "auto" selects the CPU although there is a GPU; empty if no GPU is
  // visible or another device was requested. `root` is the root of the file system to look at.
  std::string why_cpu(const std::string& root = "/") const;
  // Why "auto" takes none of `count` usable GPUs; empty: it takes them, or there are none.
  std::string why_not_on(int count) const;
  int64_t step_rows() const;
  // The default of max_num_seqs for commands with any number of requests.
  int64_t many_sequences() const;
};

// Adds the flags to a command. The MODEL positional is added separately: its place depends on the
// command.
void add_model_flags(CLI::App& app, ModelFlags* flags);
CLI::Option* add_model_positional(CLI::App& app, ModelFlags* flags);

// The path of a file or directory that comes with Fathom ("models/fathom-tiny", "tests/data/eval").
// Searches the folders above the program, its installed share folder and the source tree of the
// build. Nothing if not found.
std::optional<std::string> find_bundled(const std::string& relative_path);

// Moves a single argument to `text` if it cannot be a model, because it contains white space or is
// a list of ids: `fathom run "What is 2 + 2?"`.
void take_text_for_model(ModelFlags* flags, std::string* text);

// Whether a single word names no model, and is therefore taken as the text if nothing else is
// given: `fathom run hello`. False for a word with '/', which is a path or a hub id, and for an
// existing model.
bool is_no_model(const std::string& word);

// Moves such a word to `text` and prints a note on stderr.
void take_word_for_text(ModelFlags* flags, std::string* text);

// The model to open: the flag's value, or the bundled model.
Result<std::string> resolve_model_flag(const ModelFlags& flags);

}  // namespace fathom
