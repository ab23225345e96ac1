// What sparse attention costs and saves in a whole model on the CPU: DeepSeek-V3.2's shape cut to 4
// layers (bench/models/v3.2-4-layers: 3 dense and one with 32 of the 256 experts, 8,192 tokens in
// the vocabulary), random FP8 weights, bf16 products. Variants of a case run in turns in one
// process, so that a minute in which the machine is slow is slow for all of them.
//
//   sparse_model_bench GROUP [ROUNDS] [JSON] [CASE]
//
// CASE: the number of one of the group's cases, from 1 on.
//
// decode-attention  steps of one row at 1K to 64K keys with feed-forwards 128 wide: attention with
//                   all its projections and those of the indexer, sparse and to all keys
// decode-step       whole steps at 1K keys: the model, and the same without its indexer
// prompt            a prompt of 1,024: the adaptive path, and every row choosing
// prompt-attention  the same with feed-forwards 128 wide, and a prompt of 2,000
// thresholds        --dsa-dense-threshold 0, 512, 1,024, 2,048 for prompts of 512, 1,024, 2,000
// long-prompt       a chunk of 1,024 after 1K to 15K keys, in one layer of attention: over chosen
//                   keys, and multi-head over all keys, which masked multi-head attention would
//                   have to do beside the indexer's work
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "base/json.h"
#include "bench/probe/probe.h"
#include "device/cpu/isa.h"
#include "model/filled_model.h"
#include "model/layer_options.h"

namespace fathom {
namespace {

constexpr const char* kModel = "bench/models/v3.2-4-layers/config.json";
constexpr int64_t kAllKeys = 1 << 20;  // no row chooses: another model's answer, for its time

ThreadPool& pool() {
  static ThreadPool threads(0);
  return threads;
}

// What a variant changes of the model.
struct Variant {
  std::string name;
  std::optional<int64_t> dense_keys = {};  // AttentionPolicy's
  AttentionForm form = AttentionForm::kAuto;
  bool has_indexer = true;
  int64_t attention_layers = 0;  // so many layers with next to no feed-forward; 0: the model's
};

json::object config_of(const Variant& variant) {
  const auto text = read_text_file(kModel, 1 << 20);
  FATHOM_CHECK(text.has_value(), "run from the checkout's root: {}", text.error().message);
  json::object config = parse_json(*text, kModel)->as_object();
  if (!variant.has_indexer) {
    for (const char* key : {"index_n_heads", "index_head_dim", "index_topk"}) config.erase(key);
    config["model_type"] = "deepseek_v3";
    config["architectures"] = json::array{"DeepseekV3ForCausalLM"};
  }
  if (variant.attention_layers > 0) {
    config["num_hidden_layers"] = variant.attention_layers;
    config["first_k_dense_replace"] = variant.attention_layers;
    config["intermediate_size"] = 128;
    config["vocab_size"] = 128;
  }
  return config;
}

FilledModel make_model(const Variant& variant, int64_t tokens, int64_t rows) {
  AttentionPolicy policy = cpu_attention_policy();
  policy.form = variant.form;
  policy.dense_keys = variant.dense_keys;
  return {json::serialize(config_of(variant)), policy, tokens, rows, pool()};
}

struct Case {
  std::string name;
  int64_t context, rows;
  int repeats;  // of a step, of which the round takes the mean
};

struct Group {
  std::vector<Case> cases;
  std::vector<Variant> variants;  // of which the first is compared with the others
};

Group group_of(std::string_view name) {
  if (name == "decode-attention") {
    return {{{"1,024 keys", 1023, 1, 20},
             {"4,096 keys", 4095, 1, 10},
             {"16,384 keys", 16'383, 1, 6},
             {"65,536 keys", 65'535, 1, 3}},
            {{"sparse", {}, AttentionForm::kAuto, true, 4},
             {"all keys", {}, AttentionForm::kAuto, false, 4}}};
  }
  if (name == "decode-step") {
    return {{{"1,024 keys", 1023, 1, 10}},
            {{"with indexer"}, {"without", {}, AttentionForm::kAuto, false}}};
  }
  if (name == "prompt") {
    return {{{"1,024 tokens", 0, 1024, 1}}, {{"adaptive"}, {"every row chooses", 0}}};
  }
  if (name == "prompt-attention") {
    return {{{"1,024 tokens", 0, 1024, 1}, {"2,000 tokens", 0, 2000, 1}},
            {{"adaptive", {}, AttentionForm::kAuto, true, 4},
             {"every row chooses", 0, AttentionForm::kAuto, true, 4}}};
  }
  if (name == "thresholds") {
    return {{{"512 tokens", 0, 512, 1}, {"1,024 tokens", 0, 1024, 1}, {"2,000 tokens", 0, 2000, 1}},
            {{"2,048", 2048}, {"1,024", 1024}, {"512", 512}, {"0", 0}}};
  }
  if (name == "long-prompt") {
    return {{{"after 1,024", 1024, 1024, 1},
             {"after 3,072", 3072, 1024, 1},
             {"after 7,168", 7168, 1024, 1},
             {"after 15,360", 15'360, 1024, 1}},
            {{"chosen keys, absorbed", 0, AttentionForm::kAuto, true, 1},
             {"all keys, multi-head", kAllKeys, AttentionForm::kMha, true, 1}}};
  }
  return {};
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return (values[values.size() / 2] + values[(values.size() - 1) / 2]) / 2;
}

json::object measure(const Group& group, const Case& some, std::vector<FilledModel>& models,
                     int rounds) {
  std::vector<std::vector<double>> ms(models.size());
  for (FilledModel& model : models) {
    model.step(some.context, std::min<int64_t>(some.rows, 16));  // warm
  }
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < models.size(); ++i) {
      double sum = 0;
      for (int again = 0; again < some.repeats; ++again) {
        sum += models[i].step(some.context, some.rows);
      }
      ms[i].push_back(sum / some.repeats);
    }
  }
  json::array variants;
  for (size_t i = 0; i < models.size(); ++i) {
    std::vector<double> ratios;
    for (size_t round = 0; round < ms[i].size(); ++round) {
      ratios.push_back(ms[0][round] / ms[i][round]);
    }
    fmt::print("  {:<14}{:<24}{:>10.2f} ms   {} over it: {:.3f}\n", some.name,
               group.variants[i].name, median(ms[i]), group.variants[0].name, median(ratios));
    variants.push_back({{"variant", group.variants[i].name},
                        {"ms", json::value_from(ms[i])},
                        {"median_ms", median(ms[i])},
                        {"first_over_it", median(ratios)}});
  }
  return {{"case", some.name}, {"variants", std::move(variants)}};
}

int run(int argc, char** argv) {
  Group group = group_of(argc > 1 ? argv[1] : "");
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 5;
  const int only = argc > 4 ? std::atoi(argv[4]) : 0;
  if (group.cases.empty() || rounds < 1 || only < 0 || only > std::ssize(group.cases)) {
    fmt::print(stderr,
               "usage: sparse_model_bench decode-attention|decode-step|prompt|prompt-attention|"
               "thresholds|long-prompt [ROUNDS] [JSON] [CASE]\n");
    return 2;
  }
  if (only > 0) group.cases = {group.cases[static_cast<size_t>(only - 1)]};
  int64_t tokens = 0, rows = 0;
  for (const Case& some : group.cases) {
    tokens = std::max(tokens, some.context + some.rows);
    rows = std::max(rows, some.rows);
  }
  std::vector<FilledModel> models;
  for (const Variant& variant : group.variants) {
    models.push_back(make_model(variant, tokens, rows));
  }
  json::object all{{"what", std::string("sparse_model_bench ") + argv[1]},
                   {"isa", name_of(cpu_isa())},
                   {"threads", pool().num_threads()},
                   {"read_bytes_per_second", probe_read(pool(), uncached_bytes())},
                   {"bf16_flops", probe_math(pool(), ProbeMath::kBF16)}};
  json::array cases;
  for (const Case& some : group.cases) cases.push_back(measure(group, some, models, rounds));
  all["cases"] = std::move(cases);
  if (argc > 3) std::ofstream(argv[3]) << json::serialize(all) << "\n";
  return 0;
}

}  // namespace
}  // namespace fathom

int main(int argc, char** argv) { return fathom::run(argc, argv); }
