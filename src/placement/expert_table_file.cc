#include "placement/expert_table_file.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "base/json.h"

namespace fathom {
namespace {

constexpr std::string_view kFormat = "fathom-expert-placement";
constexpr int64_t kVersion = 1;
constexpr std::array<std::string_view, 5> kFields = {"format", "version", "num_experts",
                                                     "num_ranks", "layers"};
// kMaxTableSlots slots of up to 5 digits and a comma, and as much again for white space.
constexpr int64_t kMaxFileBytes = kMaxTableSlots * 12;
constexpr int kMaxDepth = 4;  // object, layers, ranks, slots

// `value` as an array; `name` is how errors call it.
Result<const json::array*> array_of(const json::value& value, std::string_view name) {
  if (value.is_array()) return &value.get_array();
  return invalid("{} is {}, expected an array", name, brief(value));
}

Result<std::vector<int32_t>> read_rank(const json::value& value, const std::string& name,
                                       int64_t num_experts) {
  FATHOM_TRY(const json::array* slots, array_of(value, name));
  std::vector<int32_t> experts;
  experts.reserve(slots->size());
  for (size_t slot = 0; slot < slots->size(); ++slot) {
    const json::value& expert = (*slots)[slot];
    if (!expert.is_int64() || expert.get_int64() < 0 || expert.get_int64() >= num_experts) {
      return invalid("{}[{}] is {}, expected an expert from 0 to {}", name, slot, brief(expert),
                     num_experts - 1);
    }
    experts.push_back(static_cast<int32_t>(expert.get_int64()));
  }
  return experts;
}

Result<ExpertLists> read_layers(const json::value& value, const std::string& where,
                                int64_t num_experts) {
  FATHOM_TRY(const json::array* layers, array_of(value, where + "layers"));
  ExpertLists lists;
  for (size_t layer = 0; layer < layers->size(); ++layer) {
    const std::string layer_name = fmt::format("{}layers[{}]", where, layer);
    FATHOM_TRY(const json::array* ranks, array_of((*layers)[layer], layer_name));
    RankLists& lists_of_layer = lists.emplace_back();
    for (size_t rank = 0; rank < ranks->size(); ++rank) {
      const std::string name = fmt::format("{}[{}]", layer_name, rank);
      FATHOM_TRY(auto experts, read_rank((*ranks)[rank], name, num_experts));
      lists_of_layer.push_back(std::move(experts));
    }
  }
  return lists;
}

Result<> check_header(const json::object& object, const JsonFields& fields,
                      const std::string& where) {
  FATHOM_TRY(const std::string format, fields.string("format"));
  if (format != kFormat) {
    return invalid("{}format is {:?}, expected {:?}", where, format, kFormat);
  }
  FATHOM_RETURN_IF_ERROR(fields.integer("version", kVersion, kVersion));
  for (const auto& field : object) {
    if (std::find(kFields.begin(), kFields.end(), field.key()) != kFields.end()) continue;
    return invalid("{}{:?} is not a field; there are {}", where, std::string_view(field.key()),
                   fmt::join(kFields, ", "));
  }
  return {};
}

}  // namespace

Result<ExpertTable> parse_expert_table(std::string_view text, std::string_view source) {
  const std::string where = fmt::format("{}: ", source);
  FATHOM_TRY(const json::value value, parse_json(text, source, kMaxDepth));
  if (!value.is_object()) return invalid("{}expected an object, this is {}", where, brief(value));
  const json::object& object = value.get_object();
  const JsonFields fields(object, where);
  FATHOM_RETURN_IF_ERROR(check_header(object, fields, where));
  FATHOM_TRY(const int64_t num_experts, fields.integer("num_experts", 1, kMaxTableExperts));
  FATHOM_TRY(const int64_t num_ranks, fields.integer("num_ranks", 1, kMaxTableRanks));
  if (!fields.has("layers")) return invalid("{}layers is missing", where);
  FATHOM_TRY(const ExpertLists lists, read_layers(*fields.find("layers"), where, num_experts));
  return ExpertTable::create(num_experts, static_cast<int>(num_ranks), lists, where);
}

Result<ExpertTable> read_expert_table(const std::string& path) {
  FATHOM_TRY(const std::string text, read_text_file(path, kMaxFileBytes));
  return parse_expert_table(text, path);
}

std::string expert_table_text(const ExpertTable& table) {
  std::string text;
  auto out = std::back_inserter(text);
  fmt::format_to(out, "{{\n  \"format\": \"{}\",\n  \"version\": {},\n", kFormat, kVersion);
  fmt::format_to(out, "  \"num_experts\": {},\n  \"num_ranks\": {},\n  \"layers\": [",
                 table.num_experts(), table.num_ranks());
  for (int64_t layer = 0; layer < table.num_layers(); ++layer) {
    fmt::format_to(out, "{}\n    [", layer == 0 ? "" : ",");
    for (int rank = 0; rank < table.num_ranks(); ++rank) {
      fmt::format_to(out, "{}[{}]", rank == 0 ? "" : ", ",
                     fmt::join(table.experts_of(layer, rank), ", "));
    }
    text += "]";
  }
  text += "\n  ]\n}\n";
  return text;
}

}  // namespace fathom
