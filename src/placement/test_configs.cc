#include "placement/test_configs.h"

#include "base/check.h"
#include "base/json.h"

namespace fathom {

ModelConfig published_config(const std::string& name) {
  const std::string path = std::string(FATHOM_SOURCE_DIR) + "/tests/data/configs/" + name + ".json";
  const auto text = read_text_file(path, 1 << 20);
  FATHOM_CHECK(text.has_value(), "{}", text.error().message);
  const auto config = parse_model_config(*text, path);
  FATHOM_CHECK(config.has_value(), "{}", config.error().message);
  return *config;
}

}  // namespace fathom
