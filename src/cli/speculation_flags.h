// The flags of speculation, and how many drafts a step gets of a model.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/checkpoint.h"
#include "cli/flags.h"

namespace fathom {

// Where the model has the layer and no flag says otherwise.
inline constexpr int64_t kDefaultDrafts = 0;

struct SpeculationFlags {
  std::optional<int64_t> drafts;  // the most of a sequence in a step; none: the default
  bool is_off = false;
  bool is_always = false;
  std::string config;  // vLLM's JSON; empty: none
};

void add_speculation_flags(CLI::App& app, SpeculationFlags* flags);

// The most drafts of a sequence in a step. Where drafts were asked for and the model has no MTP
// layer, logs one line and returns 0. Errors: flags that contradict one another or are out of
// range, and tensors of the MTP layer that are missing although drafts were asked for.
Result<int64_t> drafts_of(const SpeculationFlags& flags, const Checkpoint& checkpoint);

}  // namespace fathom
