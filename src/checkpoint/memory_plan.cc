#include "checkpoint/memory_plan.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <system_error>

#include "base/check.h"
#include "base/math.h"

namespace fathom {
namespace {

double gib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

std::optional<int64_t> number_in(const char* path) {
  std::ifstream stream(path);
  int64_t number = 0;
  if (stream >> number) return number;
  return std::nullopt;  // missing, or "max": no limit
}

// The number after a key at the beginning of a line: "MemAvailable:   123 kB", "anon 123".
std::optional<int64_t> field_in(const char* path, std::string_view key) {
  std::ifstream stream(path);
  std::string word;
  int64_t number = 0;
  while (stream >> word) {
    if (word == key && stream >> number) return number;
    stream.clear();
    stream.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::nullopt;
}

}  // namespace

std::vector<MemoryLine> weight_lines(const Inventory& inventory, bool with_mtp) {
  std::vector<MemoryLine> lines;
  for (int i = 0; i < kNumWeightGroups; ++i) {
    const auto group = static_cast<WeightGroup>(i);
    const int64_t bytes = inventory.of(group).bytes;
    if (bytes == 0 || (group == WeightGroup::kMtp && !with_mtp)) continue;
    lines.push_back({fmt::format("weights: {}", name_of(group)), bytes});
  }
  return lines;
}

Result<MemoryPlan> plan_memory(const MemoryRequest& request) {
  FATHOM_CHECK(request.cache_row_bytes > 0 && request.cache_layers > 0 && request.page_tokens > 0,
               "a cache of {} bytes, {} layers, pages of {}", request.cache_row_bytes,
               request.cache_layers, request.page_tokens);
  MemoryPlan plan;
  plan.request = request;
  for (const MemoryLine& line : request.fixed) plan.fixed_bytes += line.bytes;
  plan.bytes_per_token = request.cache_row_bytes * request.cache_layers +
                         plan.index_key_bytes_per_token() +
                         ceil_div(request.cache_state_bytes, request.page_tokens);
  const int64_t page_bytes = plan.bytes_per_token * request.page_tokens;
  const int64_t left = request.budget - plan.fixed_bytes;
  if (left < page_bytes) {
    return error(Code::kResourceExhausted,
                 "the weights and working space take {:.2f} GiB and one page of the cache {:.4f} "
                 "GiB, there are {:.2f} GiB; a smaller or an FP8 checkpoint would be needed",
                 gib(plan.fixed_bytes), gib(page_bytes), gib(request.budget));
  }
  plan.pages_that_fit = left / page_bytes;
  plan.pages = plan.pages_that_fit;
  if (request.max_total_tokens > 0) {
    const int64_t fitting = plan.pages_that_fit * request.page_tokens;
    if (request.max_total_tokens > fitting) {
      return error(Code::kResourceExhausted,
                   "a cache for {} tokens takes {:.2f} GiB, {:.2f} GiB are left beside the "
                   "weights; --max-total-tokens {} fits, or a narrower --kv-cache-dtype",
                   request.max_total_tokens,
                   static_cast<double>(request.max_total_tokens) *
                       static_cast<double>(plan.bytes_per_token) / (1 << 30),
                   gib(left), fitting);
    }
    plan.pages = ceil_div(request.max_total_tokens, request.page_tokens);
  }
  return plan;
}

std::string memory_plan_table(const MemoryPlan& plan) {
  std::string text = "Memory plan\n";
  const auto line = [&](std::string_view what, int64_t bytes, std::string_view note) {
    text += fmt::format("  {:<28}{:>12.4f} GiB{}{}\n", what, gib(bytes), note.empty() ? "" : "  ",
                        note);
  };
  for (const MemoryLine& fixed : plan.request.fixed) line(fixed.what, fixed.bytes, "");
  const int64_t index_keys = plan.index_key_bytes_per_token();
  line("latent cache", plan.cache_bytes(),
       fmt::format("{} tokens in {} pages, {} bytes a token{}", plan.tokens(), plan.pages,
                   plan.bytes_per_token,
                   index_keys > 0 ? fmt::format(", {} of them index keys", index_keys) : ""));
  line("in all", plan.fixed_bytes + plan.cache_bytes(), "");
  if (const RankMemory& rank = plan.request.rank; rank.ranks > 1) {
    const int64_t cache = plan.cache_bytes() / rank.ranks;
    line(fmt::format("a rank, of {}", rank.ranks), rank.weights + rank.working_space + cache,
         fmt::format("{:.4f} weights, {:.4f} working space, {:.4f} latent cache", gib(rank.weights),
                     gib(rank.working_space), gib(cache)));
  }
  line("available", plan.request.budget,
       fmt::format("{} tokens would fit", plan.pages_that_fit * plan.request.page_tokens));
  return text;
}

AvailableMemory available_memory() {
  AvailableMemory available{std::numeric_limits<int64_t>::max(), {}};
  std::ifstream("/proc/sys/kernel/random/boot_id") >> available.pool;
  if (const auto kib = field_in("/proc/meminfo", "MemAvailable:")) available.bytes = *kib * 1024;
  const auto limit_to = [&](const char* limit_path, const char* used_path, const char* used_key) {
    const auto limit = number_in(limit_path);
    if (!limit) return;
    // Anonymous memory counts as used; page cache is reclaimable.
    const int64_t left = std::max<int64_t>(*limit - field_in(used_path, used_key).value_or(0), 0);
    if (left >= available.bytes) return;
    available.bytes = left;
    std::error_code no_name;
    available.pool += std::filesystem::read_symlink("/proc/self/ns/cgroup", no_name).string();
  };
  limit_to("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.stat", "anon");
  limit_to("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.stat",
           "rss");
  return available;
}

}  // namespace fathom
