// What nodes send each other: no bytes may do worse than an error, and a step that passes all
// checks leads nowhere outside of the model.
//
// Input: one byte (0: a step, 1: its result, 2: a page's copy), the record. A step's plan hash is
// made right first: nobody finds it by chance.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "cache/latent_layout.h"
#include "engine/step_check.h"
#include "engine/step_wire.h"

namespace fathom {
namespace {

constexpr int kLanes = 2;
constexpr StepBounds kBounds{
    .vocab_size = 300, .max_model_len = 4096, .num_pages = 24, .max_rows = 256};
// Behind the epoch and the number.
constexpr size_t kHashAt = 16;

// Reads the step; where only the hash is wrong, again with the right one.
Result<> read(ReceivedStep& step, std::vector<std::byte>& record) {
  WireReader reader(record);
  const auto first = step.read(reader);
  if (first) return {};
  const std::string& message = first.error().message;
  const std::string before = " has hash ";
  const size_t found = message.find(before);
  if (found == std::string::npos) return first;
  const uint64_t hash = std::strtoull(message.c_str() + found + before.size(), nullptr, 16);
  std::memcpy(record.data() + kHashAt, &hash, sizeof hash);
  WireReader again(record);
  const auto second = step.read(again);
  FATHOM_CHECK(second.has_value(), "{}", second.error().message);
  return {};
}

void check_inside(const ForwardBatch& batch) {
  const auto below = [](std::span<const int32_t> values, int64_t end) {
    for (const int32_t value : values) FATHOM_CHECK(value >= 0 && value < end, "{}", value);
  };
  below(batch.token_ids, kBounds.vocab_size);
  below(batch.positions, kBounds.max_model_len);
  below(batch.logit_rows, batch.num_rows());
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    const auto at = static_cast<size_t>(s);
    const int64_t length =
        batch.context_lens[at] + batch.query_start[at + 1] - batch.query_start[at];
    const int64_t pages = (length + kPageSize - 1) / kPageSize;
    below(std::span(batch.block_tables)
              .subspan(at * static_cast<size_t>(batch.max_pages), static_cast<size_t>(pages)),
          kBounds.num_pages);
  }
}

void fuzz_step(std::span<const std::byte> input) {
  std::vector<std::byte> record(input.begin(), input.end());
  ReceivedStep step(kLanes);
  if (!read(step, record)) return;
  static const ExpertTable kTable = ExpertTable::contiguous(3, 8, 2);
  const auto moved = apply_moves(kTable, step.moves());
  FATHOM_CHECK(!moved || moved->num_layers() == 3, "{} layers", moved->num_layers());
  int64_t num_logits = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const ForwardBatch& batch = step.lanes()[static_cast<size_t>(lane)];
    if (!check_batch(batch, lane, kBounds)) return;
    check_inside(batch);
    num_logits += std::ssize(batch.logit_rows);
  }
  (void)check_rows(step.rows(), num_logits, kBounds);
}

void run(std::span<const std::byte> input) {
  if (input.empty()) return;
  const auto record = input.subspan(1);
  switch (static_cast<int>(input.front()) % 3) {
    case 0:
      return fuzz_step(record);
    case 1: {
      std::vector<SampledToken> tokens(2);
      std::vector<int32_t> counts(3);
      (void)read_result(record, {5, 6}, tokens, counts);
      return;
    }
    default: {
      WireReader reader(record);
      (void)read_page_copy(reader);
    }
  }
}

}  // namespace
}  // namespace fathom

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fathom::run(std::as_bytes(std::span(data, size)));
  return 0;
}
