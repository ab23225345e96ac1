// Translates launch lines of vLLM, SGLang and llama.cpp's server into flags of `fathom serve`.
//
// A flag with an equivalent is replaced by it (`-c 4096`: --max-model-len). One without effect here
// is dropped with a note. One that requests a missing feature (`--tp 8`) is an error, because the
// user relies on it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace CLI {
class App;
}

namespace fathom {

struct LaunchLine {
  std::vector<std::string> arguments;  // flags that the command has
  std::vector<std::string> notes;      // one sentence per dropped flag
};

// Translates the arguments after the command's name. Names known neither to the command nor to the
// table are kept. `model` is used if the arguments contain no MODEL.
Result<LaunchLine> translate_launch_line(const CLI::App& command,
                                         const std::vector<std::string>& arguments,
                                         const std::string& model = "");

// Whether this is a flag of other servers that the command may lack: "tensor-parallel-size",
// "-ngl".
bool is_foreign_flag(std::string_view name);

}  // namespace fathom
