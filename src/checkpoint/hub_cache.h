// Locates a model's files: a directory, or a Hugging Face id in the local hub cache. Nothing is
// downloaded. Layout of the cache (documented by huggingface_hub for other implementations):
//   ROOT/models--ORG--NAME/refs/main            the hash of the newest snapshot
//   ROOT/models--ORG--NAME/snapshots/HASH/...   links into ROOT/models--ORG--NAME/blobs
// ROOT is $HF_HUB_CACHE, $HF_HOME/hub, $XDG_CACHE_HOME/huggingface/hub or ~/.cache/huggingface/hub.
#pragma once

#include <string>

#include "base/status.h"

namespace fathom {

// Returns the directory of `model`'s files. The error for an id that is not cached contains the
// command that downloads it.
Result<std::string> resolve_model(const std::string& model);

}  // namespace fathom
