// Models with random weights that tests of whole models make of tests/data/configs.
#pragma once

#include <cstdlib>
#include <string>

#include "checkpoint/checkpoint.h"

namespace fathom {

// The model of folder `name`, looked for in the folder that FATHOM_TEST_CONFIGS names, or from the
// repository's root. The error of a missing one says so.
inline Result<Checkpoint> open_test_config(const std::string& name) {
  const char* const given = std::getenv("FATHOM_TEST_CONFIGS");
  const std::string folder = given != nullptr ? given : "tests/data/configs";
  auto opened = Checkpoint::open_dummy(folder + "/" + name);
  if (!opened) {
    opened.error().message +=
        "; run the test from the repository's root, or set FATHOM_TEST_CONFIGS to the folder "
        "tests/data/configs of the sources";
  }
  return opened;
}

}  // namespace fathom
