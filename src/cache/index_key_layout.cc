#include "cache/index_key_layout.h"

namespace fathom {

std::string_view name_of(IndexKeyFormat format) {
  switch (format) {
    case IndexKeyFormat::kE4M3:
      return "e4m3";
    case IndexKeyFormat::kBF16:
      return "bf16";
    case IndexKeyFormat::kF32:
      return "f32";
  }
  return "?";
}

int64_t IndexKeyLayout::row_bytes() const {
  switch (format) {
    case IndexKeyFormat::kE4M3:
      return dim + 4;
    case IndexKeyFormat::kBF16:
      return dim * 2;
    case IndexKeyFormat::kF32:
      return dim * 4;
  }
  return 0;
}

}  // namespace fathom
