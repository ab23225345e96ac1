// Four-bit checkpoints that the publishers' libraries wrote, against the weights that these
// libraries read back from them: tests/goldens/four_bits (tools/make_four_bit_goldens.py), or the
// folders in the directory that FATHOM_FOUR_BIT_GOLDENS names.
#include <gtest/gtest.h>

#include <bit>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "checkpoint/load_plan.h"
#include "checkpoint/safetensors.h"

namespace fathom {
namespace {

constexpr int64_t kLibraryRows = 32, kLibraryCols = 256;

std::vector<std::filesystem::path> library_cases() {
  const char* const other = std::getenv("FATHOM_FOUR_BIT_GOLDENS");
  const std::string directory =
      other != nullptr ? other : FATHOM_SOURCE_DIR "/tests/goldens/four_bits";
  std::vector<std::filesystem::path> folders;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.is_directory()) folders.push_back(entry.path());
  }
  std::sort(folders.begin(), folders.end());
  return folders;
}

// The library's dequantized weights [32, 256], in the type in which it computes them.
struct LibraryValues {
  DType dtype = DType::kF32;
  std::vector<float> of;
};

LibraryValues read_values(const std::string& path) {
  LibraryValues values;
  const auto file = read_safetensors_file(path);
  if (!file) {
    ADD_FAILURE() << file.error().message;
    return values;
  }
  const SafetensorsEntry& entry = file->tensors.at("values");
  EXPECT_EQ(entry.shape, (std::vector<int64_t>{kLibraryRows, kLibraryCols}));
  values.dtype = entry.dtype;
  std::ifstream stream(path, std::ios::binary);
  stream.seekg(file->data_offset + entry.begin);
  for (int64_t i = 0; i < kLibraryRows * kLibraryCols; ++i) {
    if (entry.dtype == DType::kBF16) {
      uint16_t bits = 0;
      stream.read(reinterpret_cast<char*>(&bits), sizeof(bits));
      values.of.push_back(to_float(bf16{bits}));
    } else {
      EXPECT_EQ(entry.dtype, DType::kF32);
      float value = 0;
      stream.read(reinterpret_cast<char*>(&value), sizeof(value));
      values.of.push_back(value);
    }
  }
  EXPECT_TRUE(stream);
  return values;
}

void expect_the_librarys_values(const std::filesystem::path& folder) {
  const LibraryValues expected = read_values(folder / "values.safetensors");
  ASSERT_EQ(std::ssize(expected.of), kLibraryRows * kLibraryCols);
  const auto checkpoint = Checkpoint::open(folder);
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const auto stored = check_stored(*checkpoint);
  ASSERT_TRUE(stored) << stored.error().message;
  LoadOptions silent;
  silent.show_progress = false;
  int placed = 0;
  const auto compare = [&](const ScaledMatrix& matrix) -> Result<> {
    ++placed;
    EXPECT_TRUE(matrix.is_four_bit());
    int64_t others = 0;
    for (int64_t row = 0; row < kLibraryRows; ++row) {
      for (int64_t col = 0; col < kLibraryCols; ++col) {
        const int64_t column = matrix.columns.empty() ? col : matrix.columns.data<int32_t>()[col];
        float value = matrix.at(row, col);
        if (expected.dtype == DType::kBF16) value = to_float(to_bf16(value));
        const float wanted = expected.of[static_cast<size_t>(row * kLibraryCols + column)];
        // -0 and 0 are the same weight.
        others += std::bit_cast<uint32_t>(value + 0.0f) != std::bit_cast<uint32_t>(wanted + 0.0f);
      }
    }
    EXPECT_EQ(others, 0) << "of " << kLibraryRows * kLibraryCols;
    return {};
  };
  const auto loaded = load_tensors(
      *checkpoint,
      {{"model.layers.0.self_attn.o_proj.weight", {kLibraryRows, kLibraryCols}, compare}}, silent);
  EXPECT_TRUE(loaded) << loaded.error().message;
  EXPECT_EQ(placed, 1);
}

TEST(FourBitLibrary, ValuesAreTheLibrarysToTheBit) {
  const auto folders = library_cases();
  EXPECT_EQ(folders.size(), 15u);
  for (const std::filesystem::path& folder : folders) {
    SCOPED_TRACE(folder.filename().string());
    expect_the_librarys_values(folder);
  }
}

}  // namespace
}  // namespace fathom
