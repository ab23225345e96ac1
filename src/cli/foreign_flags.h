// Launch lines of vLLM, SGLang and llama.cpp's server, rewritten into flags of `fathom serve`.
//
// A flag that means the same here becomes the one here (`-c 4096`: --max-model-len). One that
// changes nothing here is left out with one sentence. One that asks for what is not there (`--tp
// 8`) is an error: the line's author counts on it.
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
  std::vector<std::string> arguments;  // of flags that the command has
  std::vector<std::string> notes;      // a sentence for each flag that was left out
};

// `arguments` are those after the command's name. A name that neither the command nor the table of
// foreign flags has stays as it is. `model`: what MODEL is if the arguments do not say it.
Result<LaunchLine> translate_launch_line(const CLI::App& command,
                                         const std::vector<std::string>& arguments,
                                         const std::string& model = "");

// "tensor-parallel-size", "-ngl": a flag of the other servers that the command may lack.
bool is_foreign_flag(std::string_view name);

}  // namespace fathom
