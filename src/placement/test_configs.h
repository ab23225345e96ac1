// Published configurations for this room's tests.
#pragma once

#include <string>

#include "checkpoint/model_config.h"

namespace fathom {

// tests/data/configs/NAME.json.
ModelConfig published_config(const std::string& name);

}  // namespace fathom
