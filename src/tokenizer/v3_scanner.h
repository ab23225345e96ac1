// The pre-tokenizer of DeepSeek V3, R1, V3.1 and V3.2, hand-written: produces the same pieces as
// the three patterns below applied one inside the other, without a regular-expression engine.
#pragma once

#include <functional>
#include <string_view>

namespace fathom {

// Receives the pieces of a text in order. Their concatenation is the text.
using PieceSink = std::function<void(std::string_view piece)>;

// The patterns, as published. The third is also published with its line ends as \r\n.
inline constexpr std::string_view kV3Numbers = R"(\p{N}{1,3})";
inline constexpr std::string_view kV3Han = "[一-龥぀-ゟ゠-ヿ]+";
inline constexpr std::string_view kV3General =
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+)"
    R"(| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// `text` must be well-formed UTF-8.
void scan_v3(std::string_view text, const PieceSink& sink);

}  // namespace fathom
