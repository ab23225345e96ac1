#pragma once

#include <string>

namespace fathom {

// Whether `text` has `part` in it: for tests of messages.
inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace fathom
