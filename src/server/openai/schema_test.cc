// Every field of every table × {missing, null, wrong type, -1, 0, least, largest, one beyond,
// "NaN"}: what the table forbids is a 400 that names the field, and nothing is an internal error.
#include "server/openai/schema.h"

#include <algorithm>

#include "server/openai/generation.h"
#include "server/openai/model_bodies.h"
#include "server/openai/openapi.h"
#include "server/openai/token_requests.h"
#include "server/openai/wire_test_support.h"

namespace fathom {
namespace {

struct Endpoint {
  const char* name;
  const ObjectSchema& schema;
  std::string valid;  // a body that is accepted
  std::function<std::optional<ApiError>(std::string_view body)> call;
};

std::optional<ApiError> generate(GeneratingEndpoint endpoint, std::string_view body) {
  const auto result = prepare(endpoint, body, tiny_model(), RequestLimits(), kTestIdentity);
  return result ? std::nullopt : std::optional(result.error());
}

template <typename F>
std::function<std::optional<ApiError>(std::string_view)> answer_with(F body_of) {
  return [body_of](std::string_view body) {
    const auto result = body_of(body, tiny_model(), RequestLimits());
    return result ? std::nullopt : std::optional<ApiError>(result.error());
  };
}

std::vector<Endpoint> endpoints() {
  const auto generating = [](GeneratingEndpoint endpoint) {
    return [endpoint](std::string_view body) { return generate(endpoint, body); };
  };
  const std::string message = R"("messages":[{"role":"user","content":"Hi"}])";
  return {
      {"chat", ChatRequest::schema(),
       "{" + message + R"(,"tools":[{"type":"function","function":{"name":"f"}}],"logprobs":true})",
       generating(GeneratingEndpoint::kChat)},
      {"completions", CompletionRequest::schema(), R"({"prompt":"Hi"})",
       generating(GeneratingEndpoint::kCompletions)},
      {"messages", MessagesRequest::schema(), "{" + message + R"(,"max_tokens":5})",
       generating(GeneratingEndpoint::kMessages)},
      {"count_tokens", MessagesRequest::count_schema(), "{" + message + "}",
       answer_with(count_tokens_body)},
      {"responses", ResponsesRequest::schema(), R"({"input":"Hi"})",
       generating(GeneratingEndpoint::kResponses)},
      {"generate", GenerateRequest::schema(), R"({"text":"Hi","sampling_params":{}})",
       generating(GeneratingEndpoint::kGenerate)},
      {"tokenize", TokenizeRequest::schema(), R"({"prompt":"Hi"})", answer_with(tokenize_body)},
      {"detokenize", DetokenizeRequest::schema(), R"({"tokens":[1]})",
       answer_with(detokenize_body)},
  };
}

int64_t largest(const Type& type) {
  return type.limit == nullptr ? type.max_integer : RequestLimits().*type.limit;
}

// Independent implementation of the simple kinds.
bool allows(const Type& type, const json::value& value) {
  switch (type.kind) {
    case Type::Kind::kAny:
      return true;
    case Type::Kind::kBoolean:
      return value.is_bool();
    case Type::Kind::kInteger:
      return value.is_int64() && value.get_int64() >= type.min_integer &&
             value.get_int64() <= largest(type);
    case Type::Kind::kNumber: {
      if (!value.is_number()) return false;
      const auto number = value.to_number<double>();
      return (type.above_min ? number > type.min : number >= type.min) && number <= type.max;
    }
    case Type::Kind::kString:
      return value.is_string() && value.get_string().size() >= type.min_size &&
             value.get_string().size() <= type.max_size &&
             (type.words.empty() || std::count(type.words.begin(), type.words.end(),
                                               std::string_view(value.get_string())) > 0);
    case Type::Kind::kArray:
      return value.is_array() && value.get_array().size() >= type.min_size &&
             value.get_array().size() <= type.max_size;
    case Type::Kind::kMap:
      return value.is_object() && value.get_object().size() <= type.max_size;
    case Type::Kind::kObject:
      return value.is_object();
    case Type::Kind::kVariant:
      return value.is_object() && !type.default_tag.empty();
    case Type::Kind::kOneOf:
      return std::any_of(type.alternatives.begin(), type.alternatives.end(),
                         [&](const Type& one) { return allows(one, value); });
  }
  return false;
}

void add_limits(const Type& type, json::array& values) {
  switch (type.kind) {
    case Type::Kind::kInteger:
      values.push_back(type.min_integer);
      values.push_back(largest(type));
      if (largest(type) < std::numeric_limits<int64_t>::max()) {
        values.push_back(largest(type) + 1);
        values.push_back(type.min_integer - 1);
      }
      break;
    case Type::Kind::kNumber:
      values.insert(values.end(), {type.min, type.max, type.max + 0.001, type.min - 0.001});
      break;
    case Type::Kind::kString:
      for (const std::string_view word : type.words) values.push_back(json::string(word));
      if (type.max_size == SIZE_MAX) break;
      values.push_back(json::string(std::string(type.max_size, 'x')));
      values.push_back(json::string(std::string(type.max_size + 1, 'x')));
      break;
    case Type::Kind::kArray:
      if (type.max_size != SIZE_MAX) values.push_back(json::array(type.max_size + 1, nullptr));
      break;
    case Type::Kind::kOneOf:
      for (const Type& one : type.alternatives) add_limits(one, values);
      break;
    default:
      break;
  }
}

bool names(const std::string& param, const std::string& path) {
  return param == path || param.starts_with(path + ".") || param.starts_with(path + "[");
}

class FieldTable : public testing::TestWithParam<size_t> {
 protected:
  void check_table(const Endpoint& endpoint, const ObjectSchema& schema,
                   const std::vector<std::string>& above) {
    for (const Field& field : schema.fields) {
      std::vector<std::string> path = above;
      path.emplace_back(field.name);
      check_field(endpoint, field, path);
      if (field.type.kind == Type::Kind::kObject && field.type.object != nullptr) {
        check_table(endpoint, *field.type.object, path);
      }
    }
  }

  void check_field(const Endpoint& endpoint, const Field& field,
                   const std::vector<std::string>& path) {
    json::array values{nullptr,
                       true,
                       -1,
                       0,
                       1.5,
                       "NaN",
                       "",
                       json::array(),
                       json::object(),
                       json::array{nullptr},
                       std::numeric_limits<uint64_t>::max()};
    add_limits(field.type, values);
    for (const json::value& value : values) check_value(endpoint, field, path, value);
    if (field.required) check_value(endpoint, field, path, std::nullopt);
  }

  void check_value(const Endpoint& endpoint, const Field& field,
                   const std::vector<std::string>& path, const std::optional<json::value>& value) {
    json::value body = json::parse(endpoint.valid);
    json::object* holder = &body.get_object();
    std::string dotted;
    for (size_t i = 0; i + 1 < path.size(); ++i) {
      json::value& inner = (*holder)[path[i]];
      if (!inner.is_object()) inner = json::object();
      holder = &inner.get_object();
      dotted += path[i] + ".";
    }
    dotted += path.back();
    if (value) {
      (*holder)[path.back()] = *value;
    } else {
      holder->erase(path.back());
    }
    const std::string text = json::serialize(body);
    const auto error = endpoint.call(text);
    ++checked_;
    const bool is_absent = !value || value->is_null();
    const bool allowed = is_absent ? !field.required : allows(field.type, *value);
    const std::string shown = text.substr(0, 300);
    if (error) {
      EXPECT_LT(error->status, 500) << endpoint.name << " " << shown << ": " << error->message;
      EXPECT_TRUE(error->param) << endpoint.name << " " << shown << ": " << error->message;
    }
    if (allowed) return;
    ASSERT_TRUE(error) << endpoint.name << " accepts " << shown;
    EXPECT_EQ(error->status, 400);
    EXPECT_TRUE(names(error->param.value_or(""), dotted))
        << endpoint.name << " " << shown << " blames " << error->param.value_or("nothing") << ": "
        << error->message;
    EXPECT_NE(error->message.find(path.back()), std::string::npos) << error->message;
  }

  int checked_ = 0;
};

TEST_P(FieldTable, ForbiddenValuesNameTheField) {
  const Endpoint endpoint = endpoints()[GetParam()];
  ASSERT_FALSE(endpoint.call(endpoint.valid)) << endpoint.call(endpoint.valid)->message;
  check_table(endpoint, endpoint.schema, {});
  EXPECT_GT(checked_, 10);
  RecordProperty("values", checked_);
}
INSTANTIATE_TEST_SUITE_P(All, FieldTable, testing::Range<size_t>(0, 8),
                         [](const auto& test) { return endpoints()[test.param].name; });

std::string param_of(GeneratingEndpoint endpoint, std::string_view body) {
  const auto error = generate(endpoint, body);
  return error ? error->param.value_or("null") : "accepted";
}

TEST(Paths, NameThePlaceInsideLists) {
  using E = GeneratingEndpoint;
  EXPECT_EQ(
      param_of(E::kChat,
               R"({"messages":[{"role":"user","content":"a"},{"role":"boss","content":"b"}]})"),
      "messages[1].role");
  EXPECT_EQ(
      param_of(
          E::kChat,
          R"({"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url"}]}]})"),
      "messages[0].content[1].type");
  EXPECT_EQ(param_of(E::kChat, R"({"messages":[{"role":"user"}]})"), "messages[0].content");
  EXPECT_EQ(
      param_of(
          E::kChat,
          R"({"messages":[{"role":"user","content":"x","tool_calls":[{"function":{"name":"f","arguments":"{}"}}]}]})"),
      "messages[0].tool_calls");
  EXPECT_EQ(
      param_of(
          E::kChat,
          R"({"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"a\u0000b"}}]})"),
      "tools[0].function.name");
  EXPECT_EQ(
      param_of(
          E::kChat,
          R"({"messages":[{"role":"user","content":"x"}],"stop":["a","b","c","d","e","f","g","h","i","j","k","l","m","n","o","p","q"]})"),
      "stop");
  EXPECT_EQ(param_of(E::kChat, R"({"messages":[{"role":"user","content":"x"}],"stop":["a",""]})"),
            "stop[1]");
  EXPECT_EQ(
      param_of(E::kChat, R"({"messages":[{"role":"user","content":"x"}],"logit_bias":{"12":101}})"),
      "logit_bias.12");
  EXPECT_EQ(
      param_of(E::kChat, R"({"messages":[{"role":"user","content":"x"}],"logit_bias":{"07":1}})"),
      "logit_bias");
  EXPECT_EQ(param_of(E::kChat,
                     R"({"messages":[{"role":"user","content":"x"}],"logit_bias":{"hello":1}})"),
            "logit_bias");
  EXPECT_EQ(param_of(E::kChat,
                     R"({"messages":[{"role":"user","content":"x"}],"logit_bias":{"999999":1}})"),
            "logit_bias");
  EXPECT_EQ(param_of(E::kChat,
                     R"({"messages":[{"role":"user","content":"x"}],"stop_token_ids":[999999]})"),
            "stop_token_ids");
  EXPECT_EQ(param_of(E::kCompletions, R"({"prompt":["a",1]})"), "prompt");
  EXPECT_EQ(param_of(E::kCompletions, R"({"prompt":[[1],[999999]]})"), "prompt[1][0]");
  EXPECT_EQ(param_of(E::kCompletions, R"({"prompt":""})"), "prompt");
  EXPECT_EQ(param_of(E::kCompletions, R"({"prompt":["a",""]})"), "prompt[1]");
  EXPECT_EQ(param_of(E::kResponses, R"({"input":[{"type":"item_reference","id":"x"}]})"),
            "input[0].type");
  EXPECT_EQ(
      param_of(
          E::kMessages,
          R"({"max_tokens":1,"messages":[{"role":"user","content":[{"type":"tool_use","id":"a","name":"f","input":{}}]}]})"),
      "messages[0].content[0]");
}

TEST(UnknownFields, AreReportedAndInStrictModeRefused) {
  const std::string body =
      R"({"messages":[{"role":"user","content":"Hi","mood":1}],"novelty":true,"stream_options":{"x":1}})";
  const auto accepted =
      prepare(GeneratingEndpoint::kChat, body, tiny_model(), RequestLimits(), kTestIdentity);
  ASSERT_TRUE(accepted) << accepted.error().message;
  EXPECT_EQ(accepted->unknown_fields,
            (std::vector<std::string>{"messages[0].mood", "stream_options.x", "novelty"}));
  RequestLimits strict;
  strict.refuse_unknown = true;
  const auto refused =
      prepare(GeneratingEndpoint::kChat, body, tiny_model(), strict, kTestIdentity);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().status, 400);
  EXPECT_EQ(refused.error().param, "messages[0].mood");
  EXPECT_EQ(refused.error().code, "unsupported_parameter");
}

// Otherwise a client could take precedence over all others with -2147483648.
TEST(UnknownFields, PriorityIsOneUnlessItIsAllowed) {
  const auto prepare_with = [](const char* priority, RequestLimits limits) {
    return prepare(
        GeneratingEndpoint::kChat,
        std::string(R"({"messages":[{"role":"user","content":"Hi"}],"priority":)") + priority + "}",
        tiny_model(), limits, kTestIdentity);
  };
  RequestLimits strict, allowed;
  strict.refuse_unknown = allowed.allow_priority = true;
  const auto ignored = prepare_with("-7", RequestLimits());
  ASSERT_TRUE(ignored);
  EXPECT_EQ(ignored->priority, 0);
  EXPECT_EQ(ignored->unknown_fields, std::vector<std::string>{"priority"});
  const auto refused = prepare_with("-7", strict);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().status, 400);
  EXPECT_EQ(refused.error().param, "priority");
  EXPECT_EQ(refused.error().message,
            "priority is -7, but this server was started without --enable-priority");
  EXPECT_TRUE(prepare_with("0", strict)) << "it asks for nothing";
  const auto taken = prepare_with("-7", allowed);
  ASSERT_TRUE(taken);
  EXPECT_EQ(taken->priority, -7);
  EXPECT_TRUE(taken->unknown_fields.empty());
}

TEST(UnknownFields, LongNamesAreCut) {
  const std::string body = R"({"prompt":"Hi",")" + std::string(100'000, 'k') + R"(":1})";
  const auto accepted =
      prepare(GeneratingEndpoint::kCompletions, body, tiny_model(), RequestLimits(), kTestIdentity);
  ASSERT_TRUE(accepted);
  EXPECT_EQ(accepted->unknown_fields.at(0).size(), 64u);
}

TEST(ChoicesLimit, IsTheServersOwn) {
  RequestLimits limits;
  limits.max_choices = 2;
  const auto refused = prepare(GeneratingEndpoint::kCompletions, R"({"prompt":"Hi","n":3})",
                               tiny_model(), limits, kTestIdentity);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().message, "n is 3, expected an integer from 1 to 2");
}

// Every "$ref" in the document resolves, and the tables' limits are in it.
void check_references(const json::value& value, const json::object& components, int& count) {
  if (value.is_array()) {
    for (const json::value& item : value.get_array()) check_references(item, components, count);
  }
  if (!value.is_object()) return;
  for (const auto& [key, item] : value.get_object()) {
    if (key == "$ref") {
      const std::string_view target = item.as_string();
      const std::string_view prefix = "#/components/schemas/";
      ASSERT_TRUE(target.starts_with(prefix)) << target;
      EXPECT_TRUE(components.contains(target.substr(prefix.size()))) << target;
      ++count;
    }
    check_references(item, components, count);
  }
}

TEST(OpenApi, DescribesTheTables) {
  RequestLimits limits;
  limits.max_choices = 5;
  const json::object document = openapi_document("1.2.3", limits);
  const json::object& components = document.at("components").at("schemas").as_object();
  int references = 0;
  check_references(document, components, references);
  EXPECT_GT(references, 20);
  const json::value& chat = components.at("ChatRequest");
  EXPECT_EQ(chat.at("required"), json::value({"messages"}));
  EXPECT_EQ(json::serialize(chat.at("properties").at("n").at("anyOf").at(0)),
            R"({"type":"integer","minimum":1,"maximum":5})");
  EXPECT_EQ(json::serialize(chat.at("properties").at("top_p").at("anyOf").at(0)),
            R"({"type":"number","exclusiveMinimum":0E0,"maximum":1E0})");
  EXPECT_EQ(chat.at("properties").as_object().size(), ChatRequest::schema().fields.size());
  EXPECT_EQ(document.at("paths").as_object().size(), 15u);
}

}  // namespace
}  // namespace fathom
