// Published configurations for this room's tests.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "base/json.h"
#include "checkpoint/model_config.h"

namespace fathom {

// tests/data/configs/NAME.json.
inline ModelConfig published_config(const std::string& name) {
  const std::string path = std::string(FATHOM_SOURCE_DIR) + "/tests/data/configs/" + name + ".json";
  const auto text = read_text_file(path, 1 << 20);
  const auto config = text ? parse_model_config(*text, path) : tl::unexpected(text.error());
  if (!config) {
    ADD_FAILURE() << config.error().message;
    return {};
  }
  return *config;
}

}  // namespace fathom
