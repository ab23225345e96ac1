#include "checkpoint/hub_cache.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "base/json.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string cache_root() {
  if (auto root = environment("HF_HUB_CACHE"); !root.empty()) return root;
  if (auto home = environment("HF_HOME"); !home.empty()) return home + "/hub";
  if (auto cache = environment("XDG_CACHE_HOME"); !cache.empty()) return cache + "/huggingface/hub";
  return environment("HOME") + "/.cache/huggingface/hub";
}

bool is_plain(std::string_view text) {
  return !text.empty() && text.front() != '.' &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) {
           return std::isalnum(c) || c == '-' || c == '_' || c == '.';
         });
}

// "org/name" or "name" in the hub's alphabet; nothing that could leave the cache's directory.
bool is_hub_id(std::string_view text) {
  const size_t slash = text.find('/');
  if (text.size() > 200 || text.find("--") != std::string_view::npos) return false;
  if (slash == std::string_view::npos) return is_plain(text);
  return is_plain(text.substr(0, slash)) && is_plain(text.substr(slash + 1));
}

}  // namespace

Result<std::string> resolve_model(const std::string& model) {
  if (model.empty()) return invalid("the model is empty: give a directory or a Hugging Face id");
  std::error_code failure;
  const auto status = fs::status(model, failure);
  if (fs::is_directory(status)) return model;
  if (fs::exists(status)) {
    return invalid("{}: a file; give the directory that holds config.json", model);
  }
  if (!is_hub_id(model)) return not_found("{}: no such directory", model);

  std::string folder = "models--" + model;
  if (const size_t slash = folder.find('/'); slash != std::string::npos) {
    folder.replace(slash, 1, "--");
  }
  const std::string root = cache_root();
  const std::string base = root + "/" + folder;
  if (!fs::is_directory(base, failure)) {
    return not_found(
        "{}: neither a directory nor in the Hugging Face cache {}; download it with: "
        "hf download {}",
        model, root, model);
  }
  FATHOM_TRY(std::string revision, read_text_file(base + "/refs/main", 1024));
  revision.erase(revision.find_last_not_of(" \r\n\t") + 1);
  if (!is_plain(revision)) {
    return invalid("{}/refs/main: {:?} is not the name of a snapshot", base, revision);
  }
  const std::string snapshot = base + "/snapshots/" + revision;
  if (!fs::is_directory(snapshot, failure)) {
    return not_found(
        "{}: the snapshot that refs/main names is missing; download it with: "
        "hf download {}",
        snapshot, model);
  }
  return snapshot;
}

}  // namespace fathom
