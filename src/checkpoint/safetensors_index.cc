#include "checkpoint/safetensors_index.h"

#include "checkpoint/json_events.h"
#include "checkpoint/safetensors.h"

namespace fathom {
namespace {

bool is_plain_shard_name(std::string_view name) {
  return name.ends_with(".safetensors") && !name.starts_with('.') && name.size() <= 255 &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string_view::npos;
}

// {"metadata": anything, "weight_map": {tensor: shard}}
class IndexEvents : public JsonEvents {
 public:
  explicit IndexEvents(std::string_view source) : source_(source) {}

  SafetensorsIndex take() { return std::move(map_); }
  bool found() const { return seen_; }

  Result<> begin_object() override { return enter(true); }
  Result<> begin_array() override { return enter(false); }
  Result<> end_object() override { return leave(); }
  Result<> end_array() override { return leave(); }

  Result<> key(std::string_view text) override {
    if (depth_ == 1) {
      in_map_ = text == "weight_map";
      if (in_map_ && seen_) return invalid("{}: weight_map is there twice", source_);
      seen_ = seen_ || in_map_;
    } else if (in_map_) {
      if (text.size() > kMaxTensorNameBytes) {
        return invalid("{}: a tensor's name has {} bytes, the limit is {}", source_, text.size(),
                       kMaxTensorNameBytes);
      }
      name_ = text;
      if (map_.contains(text)) {
        return invalid("{}: tensor {:?} is listed twice", source_, name_);
      }
      if (map_.size() == kMaxTensorsInFile) {
        return invalid("{}: more than {} tensors", source_, kMaxTensorsInFile);
      }
    }
    return {};
  }

  Result<> string(std::string_view text) override {
    if (!in_map_) return scalar("a string");
    if (depth_ == 1) return not_an_object("a string");
    if (!is_plain_shard_name(text)) {
      return invalid(
          "{}: tensor {:?} is said to be in {:?}, which is not the plain name of a "
          ".safetensors file beside the index",
          source_, name_, text.substr(0, kMaxTensorNameBytes));
    }
    map_.emplace(name_, text);
    return {};
  }

  Result<> integer(int64_t value) override { return scalar(fmt::format("{}", value)); }
  Result<> other(std::string_view what) override { return scalar(what); }

 private:
  Result<> enter(bool object) {
    ++depth_;
    if (depth_ == 1 && !object) return invalid("{}: is an array, not an object", source_);
    if (in_map_ && depth_ == 2 && !object) return not_an_object("an array");
    if (in_map_ && depth_ > 2) return scalar(object ? "an object" : "an array");
    return {};
  }

  Result<> leave() {
    --depth_;
    if (depth_ == 1) in_map_ = false;
    return {};
  }

  Result<> not_an_object(std::string_view what) const {
    return invalid("{}: weight_map is {}, expected an object", source_, what);
  }

  Result<> scalar(std::string_view what) const {
    if (depth_ == 0) return invalid("{}: is {}, not an object", source_, what);
    if (!in_map_) return {};
    if (depth_ == 1) return not_an_object(what);
    return invalid("{}: tensor {:?} is said to be in {}, expected a file name", source_, name_,
                   what);
  }

  const std::string_view source_;
  SafetensorsIndex map_;
  std::string name_;
  int depth_ = 0;
  bool in_map_ = false, seen_ = false;
};

}  // namespace

Result<SafetensorsIndex> parse_safetensors_index(std::string_view text, std::string_view source) {
  IndexEvents events(source);
  FATHOM_RETURN_IF_ERROR(stream_json(text, source, 16, events));
  SafetensorsIndex index = events.take();
  if (!events.found()) return invalid("{}: weight_map is missing", source);
  if (index.empty()) return invalid("{}: weight_map is empty", source);
  return index;
}

}  // namespace fathom
