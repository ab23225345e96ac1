#include "checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/json.h"
#include "base/math.h"
#include "checkpoint/file_reader.h"
#include "checkpoint/json_events.h"

namespace fathom {
namespace {

// Published tensors have at most two dimensions; those of other tools may have a few more.
constexpr size_t kMaxDimensions = 8;

std::optional<DType> dtype_named(std::string_view name) {
  if (name == "F32") return DType::kF32;
  if (name == "BF16") return DType::kBF16;
  if (name == "F16") return DType::kF16;
  if (name == "F8_E4M3") return DType::kF8E4M3;
  if (name == "F8_E5M2") return DType::kF8E5M2;
  if (name == "F8_E8M0") return DType::kF8E8M0;
  if (name == "I32") return DType::kI32;
  if (name == "I64") return DType::kI64;
  if (name == "U8") return DType::kU8;
  return std::nullopt;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

// The number of bytes that dtype and shape require, or nothing if it exceeds 64 bits.
std::optional<int64_t> payload_bytes(const SafetensorsEntry& entry) {
  int64_t bytes = size_of(entry.dtype);
  // One zero dimension makes the tensor empty, even if the others would overflow.
  if (std::find(entry.shape.begin(), entry.shape.end(), 0) != entry.shape.end()) return 0;
  for (const int64_t size : entry.shape) {
    const auto product = checked_mul(bytes, size);
    if (!product) return std::nullopt;
    bytes = *product;
  }
  return bytes;
}

// Collects the header's tensors and checks each one at the end of its object.
class HeaderEvents : public JsonEvents {
 public:
  HeaderEvents(std::string_view source, int64_t data_bytes)
      : source_(source), data_bytes_(data_bytes) {}

  SafetensorsHeader take() { return std::move(tensors_); }

  Result<> begin_object() override {
    ++depth_;
    if (depth_ == 1) return {};
    if (depth_ > 2 || in_array_) return unexpected("an object");
    entry_ = {};
    seen_dtype_ = seen_shape_ = false;
    offsets_.clear();
    seen_offsets_ = false;
    return {};
  }

  Result<> end_object() override {
    --depth_;
    if (depth_ != 1) return {};
    if (!in_metadata_) return finish_tensor();
    in_metadata_ = false;
    return {};
  }

  Result<> begin_array() override {
    if (depth_ != 2 || in_metadata_ || in_array_ || (field_ != "shape" && !is_offsets())) {
      return unexpected("an array");
    }
    in_array_ = true;
    return {};
  }

  Result<> end_array() override {
    in_array_ = false;
    return {};
  }

  Result<> key(std::string_view text) override {
    if (depth_ == 1) return begin_entry(text);
    if (in_metadata_) return {};
    field_ = text;
    bool* seen = text == "dtype"   ? &seen_dtype_
                 : text == "shape" ? &seen_shape_
                 : is_offsets()    ? &seen_offsets_
                                   : nullptr;
    if (seen == nullptr) {
      return invalid("{}: tensor {:?} has the unknown field {:?}", source_, name_, text);
    }
    if (*seen) return invalid("{}: tensor {:?} has {} twice", source_, name_, text);
    *seen = true;
    return {};
  }

  Result<> string(std::string_view text) override {
    if (in_metadata_ && depth_ == 2) return {};
    if (depth_ != 2 || in_array_ || field_ != "dtype") return unexpected("a string");
    const auto dtype = dtype_named(text);
    if (!dtype) {
      return invalid(
          "{}: tensor {:?} has dtype {:?}, known are F32, BF16, F16, F8_E4M3, F8_E5M2, F8_E8M0, "
          "I32, I64 and U8",
          source_, name_, text.substr(0, kMaxTensorNameBytes));
    }
    entry_.dtype = *dtype;
    return {};
  }

  Result<> integer(int64_t value) override {
    if (!in_array_) return unexpected(fmt::format("{}", value));
    if (value < 0) {
      return invalid("{}: tensor {:?} has {} {}, which is negative", source_, name_, value, field_);
    }
    if (is_offsets()) {
      if (offsets_.size() == 2) return offsets_count();
      offsets_.push_back(value);
      return {};
    }
    if (entry_.shape.size() == kMaxDimensions) {
      return invalid("{}: tensor {:?} has more than {} dimensions", source_, name_, kMaxDimensions);
    }
    entry_.shape.push_back(value);
    return {};
  }

  Result<> other(std::string_view what) override { return unexpected(what); }

 private:
  bool is_offsets() const { return field_ == "data_offsets"; }

  Result<> begin_entry(std::string_view text) {
    if (text.size() > kMaxTensorNameBytes) {
      return invalid("{}: a tensor's name has {} bytes, the limit is {}", source_, text.size(),
                     kMaxTensorNameBytes);
    }
    name_ = text;
    field_.clear();
    if (text == "__metadata__") {
      if (seen_metadata_) return invalid("{}: __metadata__ is there twice", source_);
      in_metadata_ = seen_metadata_ = true;
      return {};
    }
    if (tensors_.contains(text)) {
      return invalid("{}: tensor {:?} is listed twice", source_, name_);
    }
    if (tensors_.size() == kMaxTensorsInFile) {
      return invalid("{}: more than {} tensors in one file", source_, kMaxTensorsInFile);
    }
    return {};
  }

  Result<> unexpected(std::string_view what) const {
    if (depth_ == 0) return invalid("{}: the header is {}, not an object", source_, what);
    if (in_metadata_) {
      return invalid("{}: __metadata__ must map strings to strings, found {}", source_, what);
    }
    if (depth_ == 1) {
      return invalid("{}: tensor {:?} is {}, expected an object", source_, name_, what);
    }
    return invalid("{}: tensor {:?}: {} holds {}, expected {}", source_, name_, field_, what,
                   field_ == "dtype" ? "a name" : "whole numbers below 2^63");
  }

  Result<> offsets_count() const {
    return invalid("{}: tensor {:?} must have exactly two data_offsets", source_, name_);
  }

  Result<> finish_tensor() {
    const std::string_view missing = !seen_dtype_     ? "dtype"
                                     : !seen_shape_   ? "shape"
                                     : !seen_offsets_ ? "data_offsets"
                                                      : "";
    if (!missing.empty()) return invalid("{}: tensor {:?} has no {}", source_, name_, missing);
    if (offsets_.size() != 2) return offsets_count();
    entry_.begin = offsets_[0];
    entry_.end = offsets_[1];
    if (entry_.begin > entry_.end) {
      return invalid("{}: tensor {:?} has data_offsets [{}, {}], the end before the beginning",
                     source_, name_, entry_.begin, entry_.end);
    }
    if (entry_.end > data_bytes_) {
      return invalid("{}: tensor {:?} ends at byte {} of the data, the file has {} (truncated?)",
                     source_, name_, entry_.end, data_bytes_);
    }
    const auto bytes = payload_bytes(entry_);
    if (!bytes) {
      return invalid("{}: tensor {:?} has shape {}, whose size exceeds 64 bits", source_, name_,
                     shape_text(entry_.shape));
    }
    if (*bytes != entry_.end - entry_.begin) {
      return invalid(
          "{}: tensor {:?} of shape {} and type {} takes {} bytes, its data_offsets "
          "hold {}",
          source_, name_, shape_text(entry_.shape), name_of(entry_.dtype), *bytes,
          entry_.end - entry_.begin);
    }
    tensors_.emplace(std::move(name_), std::move(entry_));
    return {};
  }

  const std::string_view source_;
  const int64_t data_bytes_;
  SafetensorsHeader tensors_;
  int depth_ = 0;
  bool in_metadata_ = false, seen_metadata_ = false, in_array_ = false;
  // The tensor being read.
  std::string name_, field_;
  SafetensorsEntry entry_;
  std::vector<int64_t> offsets_;
  bool seen_dtype_ = false, seen_shape_ = false, seen_offsets_ = false;
};

// Checks that the tensors follow each other from 0 to the end of the file.
Result<> check_coverage(const SafetensorsHeader& tensors, int64_t data_bytes,
                        std::string_view source) {
  using Item = const SafetensorsHeader::value_type*;
  std::vector<Item> order;
  order.reserve(tensors.size());
  for (const auto& item : tensors) order.push_back(&item);
  std::sort(order.begin(), order.end(), [](Item a, Item b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  int64_t covered = 0;
  for (const Item item : order) {
    const auto& [name, entry] = *item;
    if (entry.begin < covered) {
      return invalid(
          "{}: tensor {:?} begins at byte {}, inside the tensor before it, which ends "
          "at {}",
          source, name, entry.begin, covered);
    }
    if (entry.begin > covered) {
      return invalid("{}: a hole before tensor {:?}: bytes {} to {} belong to no tensor", source,
                     name, covered, entry.begin);
    }
    covered = entry.end;
  }
  if (covered != data_bytes) {
    return invalid("{}: the tensors end at byte {} of the data, the file has {}", source, covered,
                   data_bytes);
  }
  return {};
}

}  // namespace

std::string_view published_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kBF16:
      return "BF16";
    case DType::kF16:
      return "F16";
    case DType::kF8E4M3:
      return "F8_E4M3";
    case DType::kF8E5M2:
      return "F8_E5M2";
    case DType::kF8E8M0:
      return "F8_E8M0";
    case DType::kI32:
      return "I32";
    case DType::kI64:
      return "I64";
    case DType::kU8:
      return "U8";
  }
  return "?";
}

Result<SafetensorsHeader> parse_safetensors_header(std::string_view text, int64_t data_bytes,
                                                   std::string_view source) {
  if (!text.starts_with('{')) {
    return invalid("{}: the header does not begin with '{{' (not a safetensors file?)", source);
  }
  HeaderEvents events(source, data_bytes);
  FATHOM_RETURN_IF_ERROR(stream_json(text, source, 4, events));
  SafetensorsHeader tensors = events.take();
  FATHOM_RETURN_IF_ERROR(check_coverage(tensors, data_bytes, source));
  return tensors;
}

std::string safetensors_head(const SafetensorsHeader& tensors) {
  json::object header{{"__metadata__", {{"format", "pt"}}}};
  for (const auto& [name, entry] : tensors) {
    header[name] = {{"dtype", published_name(entry.dtype)},
                    {"shape", json::value_from(entry.shape)},
                    {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string text = json::serialize(header);
  text.resize(static_cast<size_t>(round_up(static_cast<int64_t>(text.size()), 8)), ' ');
  const uint64_t length = text.size();
  std::string head(8, '\0');
  std::memcpy(head.data(), &length, 8);
  return head + text;
}

Result<SafetensorsFile> read_safetensors_file(const std::string& path) {
  FATHOM_TRY(const FileReader file, FileReader::open(path));
  if (file.size() < 8) {
    return invalid("{}: {} bytes, too short for a safetensors file", path, file.size());
  }
  unsigned char prefix[8];
  FATHOM_RETURN_IF_ERROR(file.read(prefix, 8, 0));
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | prefix[i];
  if (length == 0) return invalid("{}: the header length is 0", path);
  if (length > static_cast<uint64_t>(kMaxSafetensorsHeader)) {
    return invalid(
        "{}: the header length is {}, the format's limit is {} (not a safetensors file?)", path,
        length, kMaxSafetensorsHeader);
  }
  const auto header_bytes = static_cast<int64_t>(length);
  if (header_bytes > file.size() - 8) {
    return invalid("{}: the header length is {}, the file has {} bytes after it (truncated?)", path,
                   header_bytes, file.size() - 8);
  }
  std::string text(static_cast<size_t>(header_bytes), '\0');
  FATHOM_RETURN_IF_ERROR(file.read(text.data(), header_bytes, 8));
  SafetensorsFile result;
  result.data_offset = 8 + header_bytes;
  FATHOM_TRY(result.tensors,
             parse_safetensors_header(text, file.size() - result.data_offset, path));
  return result;
}

}  // namespace fathom
