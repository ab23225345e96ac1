// The safetensors format, for untrusted files. A shard is
//
//   8 bytes   N, little-endian
//   N bytes   JSON, {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, …,
//             "__metadata__": {string: string}}, padded with spaces
//   the rest  the tensors' bytes, row-major; offsets count from here
//
// A header is accepted only if its tensors cover the rest of the file exactly once, without gaps,
// and each has as many bytes as its dtype and shape require. Memory use grows with the actual size
// of the header, never with a number in it. Source: the format's description in the safetensors
// README.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "tensor/dtype.h"

namespace fathom {

// The format's own limit for N.
inline constexpr int64_t kMaxSafetensorsHeader = 100'000'000;
// The longest published name has 60 bytes.
inline constexpr size_t kMaxTensorNameBytes = 512;
// The largest published model has 140,000 tensors in all its files.
inline constexpr size_t kMaxTensorsInFile = 250'000;

// The name of a type in headers, for example "F8_E4M3".
std::string_view published_name(DType dtype);

struct SafetensorsEntry {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;  // empty: a scalar
  int64_t begin = 0;           // bytes, from the end of the header
  int64_t end = 0;
};
using SafetensorsHeader = std::map<std::string, SafetensorsEntry, std::less<>>;

// Parses and checks the JSON part. data_bytes is the number of bytes that follow it in the file.
// `source` (the file's name) begins each error.
Result<SafetensorsHeader> parse_safetensors_header(std::string_view text, int64_t data_bytes,
                                                   std::string_view source);

// The bytes before the data of a file with these tensors: length and JSON, padded so that the data
// begins at a multiple of 8. Includes the metadata {"format": "pt"}, which PyTorch's readers
// require.
std::string safetensors_head(const SafetensorsHeader& tensors);

struct SafetensorsFile {
  SafetensorsHeader tensors;
  int64_t data_offset = 0;  // first data byte: 8 + N
};

// Opens a shard and reads its header, but no data.
Result<SafetensorsFile> read_safetensors_file(const std::string& path);

}  // namespace fathom
