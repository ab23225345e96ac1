#include "tokenizer/tokenizer_json.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "base/json.h"
#include "tokenizer/byte_level.h"

namespace fathom {
namespace {

// Maximal size of one added token; the longest published one has about 30 bytes.
constexpr size_t kMaxContentBytes = 4096;

Result<const json::object*> object_field(const json::object& parent, std::string_view key,
                                         std::string_view source) {
  const json::value* value = parent.if_contains(key);
  if (value == nullptr) return invalid("{}: {} is missing", source, key);
  if (!value->is_object()) {
    return invalid("{}: {} is {}, expected an object", source, key, brief(*value));
  }
  return &value->get_object();
}

// Accepts null or an empty Sequence.
Result<> check_normalizer(const json::value* normalizer, std::string_view source) {
  if (normalizer == nullptr || normalizer->is_null()) return {};
  if (!normalizer->is_object()) {
    return invalid("{}: normalizer is {}, expected an object", source, brief(*normalizer));
  }
  const json::object& object = normalizer->get_object();
  FATHOM_TRY(const std::string type,
             JsonFields(object, fmt::format("{}: normalizer.", source)).string("type"));
  const json::value* list = object.if_contains("normalizers");
  const bool empty = list != nullptr && list->is_array() && list->get_array().empty();
  if (type == "Sequence" && empty) return {};
  return invalid("{}: normalizer has type \"{}\"; only an empty Sequence is supported", source,
                 type);
}

Result<> check_decoder(const json::value* decoder, std::string_view source) {
  if (decoder == nullptr || decoder->is_null()) return {};
  if (!decoder->is_object()) {
    return invalid("{}: decoder is {}, expected an object", source, brief(*decoder));
  }
  const JsonFields fields(decoder->get_object(), fmt::format("{}: decoder.", source));
  FATHOM_TRY(const std::string type, fields.string("type"));
  if (type == "ByteLevel") return {};
  return invalid("{}: decoder.type is \"{}\", only ByteLevel is supported", source, type);
}

// Refuses fields of the BPE model that change ids in an unsupported way.
Result<> check_model_options(const JsonFields& fields, std::string_view source) {
  FATHOM_TRY(const auto type, fields.optional_string("type"));
  if (type.value_or("BPE") != "BPE") {
    return invalid("{}: model.type is \"{}\", only BPE is supported", source, *type);
  }
  FATHOM_TRY(const auto dropout, fields.optional_number("dropout", 0, 1));
  if (dropout.value_or(0) != 0) {
    return invalid("{}: model.dropout is {}, only 0 is supported", source, *dropout);
  }
  FATHOM_TRY(const auto fallback, fields.optional_boolean("byte_fallback"));
  if (fallback.value_or(false)) {
    return invalid("{}: model.byte_fallback is true, only byte-level vocabularies are supported",
                   source);
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    FATHOM_TRY(const auto text, fields.optional_string(key));
    if (!text.value_or("").empty()) {
      return invalid("{}: model.{} is \"{}\", only none is supported", source, key, *text);
    }
  }
  return {};
}

Result<std::vector<Bpe::Entry>> read_vocab(const json::object& vocab, std::string_view source) {
  std::vector<Bpe::Entry> entries;
  entries.reserve(vocab.size());
  std::vector<bool> used;
  for (const auto& [key, value] : vocab) {
    const std::string_view name(key.data(), key.size());
    if (!value.is_int64() || value.get_int64() < 0 || value.get_int64() >= Bpe::kMaxIds) {
      return invalid("{}: model.vocab[{}] is {}, ids are 0 to {}", source, brief(json::value(name)),
                     brief(value), Bpe::kMaxIds - 1);
    }
    const auto id = static_cast<int32_t>(value.get_int64());
    if (static_cast<size_t>(id) >= used.size()) used.resize(id + 1);
    if (used[id]) {
      return invalid("{}: model.vocab[{}] is {}, an id that another entry has", source,
                     brief(json::value(name)), id);
    }
    used[id] = true;
    auto bytes = bytes_of_glyphs(name);
    const bool mergeable = bytes.has_value();
    entries.push_back({mergeable ? std::move(*bytes) : std::string(name), id, mergeable});
  }
  if (entries.empty()) return invalid("{}: model.vocab is empty", source);
  return entries;
}

// Parses "left right" or ["left", "right"].
std::optional<std::pair<std::string_view, std::string_view>> merge_sides(const json::value& item) {
  const auto view = [](const json::string& s) { return std::string_view(s.data(), s.size()); };
  if (item.is_string()) {
    const std::string_view text = view(item.get_string());
    const size_t space = text.find(' ');
    if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos) {
      return std::nullopt;
    }
    return std::pair(text.substr(0, space), text.substr(space + 1));
  }
  if (!item.is_array() || item.get_array().size() != 2) return std::nullopt;
  const json::array& pair = item.get_array();
  if (!pair[0].is_string() || !pair[1].is_string()) return std::nullopt;
  return std::pair(view(pair[0].get_string()), view(pair[1].get_string()));
}

Result<std::vector<Bpe::NamedMerge>> read_merges(const json::object& model,
                                                 std::string_view source) {
  const json::value* list = model.if_contains("merges");
  if (list == nullptr || !list->is_array()) {
    return invalid("{}: model.merges is {}, expected an array", source,
                   list == nullptr ? "missing" : brief(*list));
  }
  const json::array& items = list->get_array();
  if (items.size() > Bpe::kMaxMerges) {
    return invalid("{}: model.merges has {} entries, the limit is {}", source, items.size(),
                   Bpe::kMaxMerges);
  }
  std::vector<Bpe::NamedMerge> merges;
  merges.reserve(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const auto sides = merge_sides(items[i]);
    if (!sides) {
      return invalid("{}: model.merges[{}] is {}, expected \"left right\" or [\"left\", \"right\"]",
                     source, i, brief(items[i]));
    }
    auto left = bytes_of_glyphs(sides->first);
    auto right = bytes_of_glyphs(sides->second);
    if (!left || !right) {
      return invalid("{}: model.merges[{}] is {}, which is not written in byte-level characters",
                     source, i, brief(items[i]));
    }
    merges.push_back({std::move(*left), std::move(*right)});
  }
  return merges;
}

Result<AddedToken> read_added_token(const json::value& item, const std::string& where) {
  if (!item.is_object()) return invalid("{} is {}, expected an object", where, brief(item));
  const JsonFields fields(item.get_object(), where + ".");
  AddedToken token;
  FATHOM_TRY(const int64_t id, fields.integer("id", 0, Bpe::kMaxIds - 1));
  token.id = static_cast<int32_t>(id);
  FATHOM_TRY(token.content, fields.string("content"));
  if (token.content.empty() || token.content.size() > kMaxContentBytes) {
    return invalid("{}.content has {} bytes, allowed are 1 to {}", where, token.content.size(),
                   kMaxContentBytes);
  }
  for (const char* flag : {"single_word", "lstrip", "rstrip"}) {
    FATHOM_TRY(const auto value, fields.optional_boolean(flag));
    if (value.value_or(false)) {
      return invalid("{}.{} is true, only false is supported", where, flag);
    }
  }
  FATHOM_TRY(const auto special, fields.optional_boolean("special"));
  FATHOM_TRY(const auto normalized, fields.optional_boolean("normalized"));
  token.special = special.value_or(false);
  token.normalized = normalized.value_or(!token.special);
  return token;
}

// Reads the added tokens and checks that their ids agree with the vocabulary and with each other.
Result<std::vector<AddedToken>> read_added_tokens(const json::object& root,
                                                  const json::object& vocab,
                                                  const std::vector<Bpe::Entry>& entries,
                                                  std::string_view source) {
  std::vector<AddedToken> tokens;
  const json::value* list = root.if_contains("added_tokens");
  if (list == nullptr || list->is_null()) return tokens;
  if (!list->is_array()) {
    return invalid("{}: added_tokens is {}, expected an array", source, brief(*list));
  }
  std::unordered_set<int32_t> vocab_ids;
  for (const Bpe::Entry& entry : entries) vocab_ids.insert(entry.id);
  std::unordered_map<int32_t, std::string> content_of;
  std::unordered_map<std::string, int32_t> id_of;
  for (size_t i = 0; i < list->get_array().size(); ++i) {
    const std::string where = fmt::format("{}: added_tokens[{}]", source, i);
    FATHOM_TRY(AddedToken token, read_added_token(list->get_array()[i], where));
    const json::value* same = vocab.if_contains(token.content);
    if (same != nullptr ? same->get_int64() != token.id : vocab_ids.contains(token.id)) {
      return invalid("{}.id is {} for {}, but model.vocab has {}", where, token.id,
                     brief(json::value(token.content)),
                     same != nullptr ? fmt::format("{} for it", same->get_int64())
                                     : "another entry with this id");
    }
    const auto [content, new_id] = content_of.emplace(token.id, token.content);
    const auto [id, new_content] = id_of.emplace(token.content, token.id);
    if (content->second != token.content || id->second != token.id) {
      return invalid("{}.id is {} for {}, which contradicts an earlier added token", where,
                     token.id, brief(json::value(token.content)));
    }
    if (new_id && new_content) tokens.push_back(std::move(token));
  }
  return tokens;
}

Result<TokenizerParts> read_parts(const json::object& root, std::string_view source) {
  FATHOM_RETURN_IF_ERROR(check_normalizer(root.if_contains("normalizer"), source));
  FATHOM_RETURN_IF_ERROR(check_decoder(root.if_contains("decoder"), source));
  FATHOM_TRY(const json::object* model, object_field(root, "model", source));
  const JsonFields options(*model, fmt::format("{}: model.", source));
  FATHOM_RETURN_IF_ERROR(check_model_options(options, source));
  FATHOM_TRY(const auto ignore_merges, options.optional_boolean("ignore_merges"));
  const json::value* pre = root.if_contains("pre_tokenizer");
  if (pre == nullptr) return invalid("{}: pre_tokenizer is missing", source);
  FATHOM_TRY(PreTokenizer pre_tokenizer, PreTokenizer::from_json(*pre, source));

  const json::value* vocab = model->if_contains("vocab");
  if (vocab == nullptr || !vocab->is_object()) {
    return invalid("{}: model.vocab is {}, expected an object", source,
                   vocab == nullptr ? "missing" : brief(*vocab));
  }
  FATHOM_TRY(std::vector<Bpe::Entry> entries, read_vocab(vocab->get_object(), source));
  FATHOM_TRY(auto added, read_added_tokens(root, vocab->get_object(), entries, source));
  FATHOM_TRY(const auto merges, read_merges(*model, source));
  auto bpe = Bpe::build(entries, merges, ignore_merges.value_or(false));
  if (!bpe) return with_context(fmt::format("{}: ", source), bpe.error());
  std::erase_if(entries, [](const Bpe::Entry& entry) { return entry.mergeable; });
  return TokenizerParts{std::move(*bpe), std::move(pre_tokenizer), std::move(added),
                        std::move(entries)};
}

// Reads "<s>", {"content": "<s>", …} or null.
Result<std::optional<std::string>> read_token_name(const json::object& root, std::string_view key,
                                                   std::string_view source) {
  const json::value* value = root.if_contains(key);
  if (value != nullptr && value->is_object()) {
    const JsonFields fields(value->get_object(), fmt::format("{}: {}.", source, key));
    FATHOM_TRY(auto content, fields.string("content"));
    return std::optional<std::string>(std::move(content));
  }
  return JsonFields(root, fmt::format("{}: ", source)).optional_string(key);
}

// Reads a string, or a list of {"name", "template"}, of which "default" is used.
Result<std::optional<std::string>> read_chat_template(const json::object& root,
                                                      std::string_view source) {
  const json::value* value = root.if_contains("chat_template");
  if (value == nullptr || !value->is_array()) {
    return JsonFields(root, fmt::format("{}: ", source)).optional_string("chat_template");
  }
  for (const json::value& item : value->get_array()) {
    if (!item.is_object()) {
      return invalid("{}: chat_template holds {}, expected objects", source, brief(item));
    }
    const JsonFields fields(item.get_object(), fmt::format("{}: chat_template.", source));
    FATHOM_TRY(const std::string name, fields.string("name"));
    if (name == "default") return fields.optional_string("template");
  }
  return std::optional<std::string>();
}

Result<json::value> parse_object(std::string_view text, std::string_view source) {
  FATHOM_TRY(json::value root, parse_json(text, source));
  if (!root.is_object()) return invalid("{}: is {}, expected an object", source, brief(root));
  return root;
}

}  // namespace

Result<TokenizerParts> parse_tokenizer_json(std::string_view text, std::string_view source) {
  FATHOM_TRY(const json::value root, parse_object(text, source));
  return read_parts(root.get_object(), source);
}

Result<TokenizerConfig> parse_tokenizer_config(std::string_view text, std::string_view source) {
  FATHOM_TRY(const json::value value, parse_object(text, source));
  const json::object& root = value.get_object();
  const JsonFields fields(root, fmt::format("{}: ", source));
  TokenizerConfig config;
  FATHOM_TRY(config.bos_token, read_token_name(root, "bos_token", source));
  FATHOM_TRY(config.eos_token, read_token_name(root, "eos_token", source));
  FATHOM_TRY(config.chat_template, read_chat_template(root, source));
  FATHOM_TRY(const auto add_bos, fields.optional_boolean("add_bos_token"));
  FATHOM_TRY(const auto tokenizer_class, fields.optional_string("tokenizer_class"));
  // transformers' default: Llama's tokenizers add BOS, others do not.
  config.add_bos = add_bos.value_or(tokenizer_class.value_or("").starts_with("LlamaTokenizer"));
  return config;
}

}  // namespace fathom
