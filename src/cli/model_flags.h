// The flags that say which model runs and how: the same for every command that runs one.
#pragma once

#include <string>

#include "cache/latent_layout.h"
#include "checkpoint/model_config.h"
#include "cli/flags.h"
#include "model/attention_plan.h"

namespace fathom {

struct ModelFlags {
  std::string model;  // a directory or a Hugging Face id; empty: the bundled model
  std::string load_format = "auto";
  std::optional<int64_t> num_hidden_layers;  // with load_format dummy: as if the model had so many

  std::string device = "auto";
  std::string dtype = "auto";
  std::string quantization = "auto";
  std::string kv_cache_dtype = "auto";
  std::string attention = "auto";
  bool deterministic = false;
  std::string chat_format = "auto";
  std::string chat_template;  // a file or a format's name; empty: by chat_format

  int64_t max_model_len = 0;                  // 0: the model's own, as far as the cache holds it
  std::optional<int64_t> max_num_seqs;        // none: what the command needs
  std::optional<int64_t> max_batched_tokens;  // rows of one step; none: what the device is good for
  std::optional<int64_t> max_total_tokens;    // tokens that the cache holds; none: what is needed
  std::optional<bool> prefix_caching;         // none: what the command needs
  int64_t kv_offload_gib = 0;                 // host memory for pages that leave the cache
  std::string kv_offload_dir;                 // and files for those that leave that; empty: none
  int64_t kv_offload_disk_gib = 64;           // of them all
  int64_t gpu_step_seconds = 30;              // that a GPU's step may take; 0: any time
  int64_t threads = 0;                        // 0: one a core
  std::optional<int64_t> seed;
  bool quiet = false;

  bool graphs = true;

  bool is_dummy() const { return load_format == "dummy"; }
  DType compute() const;
  CacheFormat cache_format() const;
  AttentionForm attention_form() const;
  // The number of the GPU to compute on; none: on the CPU. "auto" takes the first GPU that there
  // is, if it can do what the other flags ask for.
  Result<std::optional<int>> gpu() const;
  // Why "auto" takes the CPU beside a GPU, in one sentence; empty where there is no GPU to be seen
  // or something else was asked for. `root`: of the file system that is looked at.
  std::string why_cpu(const std::string& root = "/") const;
  bool fits_gpu() const;  // what the other flags ask for can be computed on a GPU
  int64_t step_rows() const;
  // Sequences that a command with any number of requests runs together where no flag says so.
  int64_t many_sequences() const;
};

// Adds them to a command. The MODEL positional is added apart: its place depends on the command.
void add_model_flags(CLI::App& app, ModelFlags* flags);
CLI::Option* add_model_positional(CLI::App& app, ModelFlags* flags);

// A file or directory that comes with Fathom ("models/fathom-tiny", "tests/data/eval"): looked for
// in the folders above the program, in its installed share folder and in the source tree that it
// was built from. Nothing if it is in none.
std::optional<std::string> find_bundled(const std::string& relative_path);

// A single argument that cannot be a model, because it has white space or is a list of ids, is the
// text that would have come second: `fathom run "What is 2 + 2?"`.
void take_text_for_model(ModelFlags* flags, std::string* text);

// A single word that names no model is that text too, where nothing else is given: `fathom run
// hello`. False for a word with '/', which is a path or an id by its form, and for a model that is
// there.
bool is_no_model(const std::string& word);

// Makes such a word the text, and says so on stderr.
void take_word_for_text(ModelFlags* flags, std::string* text);

// What to open: the flag's value, or the bundled model.
Result<std::string> resolve_model_flag(const ModelFlags& flags);

}  // namespace fathom
