// Flags of vLLM and SGLang that launch lines hold and that change nothing here: accepted, so that
// those lines work, and each said to be without effect in one line.
//
// Those that ask for more than there is ("--tp 8") are errors: the line's author counts on it.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace fathom {

// Adds them to a command. When they are parsed, a sentence for each that was given is added to
// `notes`, which must outlive the parsing.
void add_foreign_flags(CLI::App& command, std::vector<std::string>* notes);

}  // namespace fathom
