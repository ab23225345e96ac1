// A message of dispatch: the header, the row's ends of pairs, the pairs' slots, and the rows, which
// begin at a multiple of 64 bytes.
#include "model/expert_exchange.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "base/math.h"

namespace fathom {
namespace {

constexpr int64_t kAlignment = 64;

struct MessageHeader {
  int64_t rows = 0, pairs = 0;
};

// Where the parts of a message are, in bytes.
struct MessageLayout {
  MessageLayout(const MessageHeader& header, int64_t row_size)
      : row_bytes(row_size),
        slots(pair_ends + header.rows * int64_t{sizeof(int32_t)}),
        rows(round_up(slots + header.pairs * int64_t{sizeof(int32_t)})),
        end(round_up(rows + header.rows * row_bytes)) {}

  static int64_t round_up(int64_t bytes) { return ceil_div(bytes, kAlignment) * kAlignment; }

  int64_t row_bytes;
  int64_t pair_ends = sizeof(MessageHeader);
  int64_t slots, rows, end;
};

template <typename T>
void put(std::byte* to, std::span<const T> values) {
  if (!values.empty()) std::memcpy(to, values.data(), values.size_bytes());
}

// A message that another rank gave, read in place.
class Message {
 public:
  // Empty bytes are a message without rows. Another size than that of the header's numbers is a
  // mistake of the rank that gave it.
  Message(Group& world, int from, ConstBytes bytes, int64_t row_bytes) : bytes_(bytes) {
    if (bytes.empty()) return;
    if (bytes.size() < sizeof header_) world.fail_bytes(from, bytes.size(), sizeof header_);
    std::memcpy(&header_, bytes.data(), sizeof header_);
    layout_ = MessageLayout(header_, row_bytes);
    if (std::ssize(bytes) != layout_.end) {
      world.fail_bytes(from, bytes.size(), static_cast<size_t>(layout_.end));
    }
  }

  int64_t num_rows() const { return header_.rows; }
  int64_t num_pairs() const { return header_.pairs; }
  int32_t pair_end(int64_t row) const { return number(layout_.pair_ends, row); }
  int32_t slot(int64_t pair) const { return number(layout_.slots, pair); }
  const std::byte* rows() const { return bytes_.data() + layout_.rows; }

 private:
  int32_t number(int64_t first, int64_t i) const {
    int32_t value = 0;
    std::memcpy(&value, bytes_.data() + first + i * int64_t{sizeof value}, sizeof value);
    return value;
  }

  ConstBytes bytes_;
  MessageHeader header_;
  MessageLayout layout_ = MessageLayout({}, 0);
};

}  // namespace

ExpertExchange::ExpertExchange(Group& world, const Stream& stream)
    : world_(world),
      stream_(stream),
      requests_(static_cast<size_t>(world.size())),
      to_each_(static_cast<size_t>(world.size())) {}

int64_t ExpertExchange::planned_bytes(const ModelConfig& config, const Placement& placement,
                                      DType operand, int64_t max_rows) {
  const int64_t world = placement.world(), k = config.experts_per_token;
  const int64_t row_bytes = config.hidden * size_of(operand);
  const int64_t own_rows = ceil_div(max_rows, placement.tp);
  const int64_t pairs = ceil_div(max_rows * placement.dp * k, world);
  return own_rows * std::min(k, world) * row_bytes +             // given in dispatch
         std::min(max_rows * placement.dp, pairs) * row_bytes +  // rows to compute
         pairs * config.hidden * int64_t{sizeof(float)} +        // given in combine
         expert_outputs_workspace_bytes(pairs, config.num_experts, config.moe_intermediate);
}

void ExpertExchange::add_experts(const ExpertTable& table, int64_t layer,
                                 std::span<const MlpWeights> slots, ConstTensorView x,
                                 ConstTensorView expert_ids, ConstTensorView expert_weights,
                                 TensorView out) {
  FATHOM_CHECK(table.num_ranks() == world_.size() &&
                   std::ssize(slots) == std::ssize(table.experts_of(layer, world_.rank())),
               "a table of {} ranks for {}; {} slots", table.num_ranks(), world_.size(),
               slots.size());
  FATHOM_CHECK(x.size(0) == out.size(0) && x.size(1) == out.size(1) &&
                   x.size(0) == expert_ids.size(0) && x.size(0) == expert_weights.size(0) &&
                   expert_ids.size(1) == expert_weights.size(1),
               "x {}, ids {}, weights {}, out {}", x.shape_string(), expert_ids.shape_string(),
               expert_weights.shape_string(), out.shape_string());
  choose_copies(table, layer, expert_ids, expert_weights);
  compute(dispatch(x), slots, x.size(1), x.dtype());
  combine(expert_ids.size(1), out);
}

// Fills requests_ and origins_.
void ExpertExchange::choose_copies(const ExpertTable& table, int64_t layer,
                                   ConstTensorView expert_ids, ConstTensorView expert_weights) {
  for (Request& request : requests_) {
    request.rows.clear();
    request.pair_ends.clear();
    request.slots.clear();
  }
  origins_.clear();
  order_.resize(static_cast<size_t>(expert_ids.size(1)));
  for (int64_t row = 0; row < expert_ids.size(0); ++row) {
    const int32_t* ids = expert_ids.row<int32_t>(row);
    const float* weights = expert_weights.row<float>(row);
    std::iota(order_.begin(), order_.end(), 0);
    std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) { return ids[a] < ids[b]; });
    for (const int32_t k : order_) {
      const ExpertCopy copy = table.copy_for(layer, ids[k], world_.rank(), row);
      Request& request = requests_[static_cast<size_t>(copy.rank)];
      if (request.rows.empty() || request.rows.back() != row) {
        request.rows.push_back(static_cast<int32_t>(row));
        request.pair_ends.push_back(0);
      }
      origins_.push_back({copy.rank, std::ssize(request.slots), weights[k]});
      request.slots.push_back(copy.slot);
      request.pair_ends.back() = static_cast<int32_t>(request.slots.size());
    }
  }
}

std::span<const ConstBytes> ExpertExchange::dispatch(ConstTensorView x) {
  const int64_t row_bytes = x.size(1) * size_of(x.dtype());
  const int64_t row_stride = x.stride(0) * size_of(x.dtype());
  const auto* const x_bytes = static_cast<const std::byte*>(x.raw());
  const auto layout_of = [&](const Request& request) {
    return MessageLayout({std::ssize(request.rows), std::ssize(request.slots)}, row_bytes);
  };
  int64_t total = 0;
  for (const Request& request : requests_) {
    if (!request.rows.empty()) total += layout_of(request).end;
  }
  std::byte* to = world_.staging(static_cast<size_t>(total)).data();
  for (size_t rank = 0; rank < requests_.size(); ++rank) {
    const Request& request = requests_[rank];
    to_each_[rank] = {};
    if (request.rows.empty()) continue;
    const MessageLayout layout = layout_of(request);
    const MessageHeader header = {std::ssize(request.rows), std::ssize(request.slots)};
    std::memcpy(to, &header, sizeof header);
    put(to + layout.pair_ends, std::span<const int32_t>(request.pair_ends));
    put(to + layout.slots, std::span<const int32_t>(request.slots));
    std::byte* next = to + layout.rows;
    for (const int32_t row : request.rows) {
      std::memcpy(next, x_bytes + row * row_stride, static_cast<size_t>(row_bytes));
      next += row_bytes;
    }
    to_each_[rank] = {to, static_cast<size_t>(layout.end)};
    to += layout.end;
  }
  return world_.meet(Collective::kDispatch, to_each_);
}

// Computes what the ranks ask for; to_each_ has the outputs then.
void ExpertExchange::compute(std::span<const ConstBytes> received,
                             std::span<const MlpWeights> slots, int64_t hidden, DType type) {
  const int64_t row_bytes = hidden * size_of(type);
  std::vector<Message> messages;
  messages.reserve(received.size());
  int64_t rows = 0, pairs = 0;
  for (size_t rank = 0; rank < received.size(); ++rank) {
    messages.emplace_back(world_, static_cast<int>(rank), received[rank], row_bytes);
    rows += messages.back().num_rows();
    pairs += messages.back().num_pairs();
  }
  std::byte* const x = x_.take(static_cast<size_t>(rows * row_bytes)).data();
  x_rows_.clear();
  slots_.clear();
  int64_t row = 0;
  for (const Message& message : messages) {
    if (message.num_rows() == 0) continue;
    std::memcpy(x + row * row_bytes, message.rows(),
                static_cast<size_t>(message.num_rows() * row_bytes));
    int32_t pair = 0;
    for (int64_t i = 0; i < message.num_rows(); ++i, ++row) {
      for (; pair < message.pair_end(i); ++pair) {
        x_rows_.push_back(static_cast<int32_t>(row));
        slots_.push_back(message.slot(pair));
      }
    }
  }
  const int64_t output_bytes = hidden * int64_t{sizeof(float)};
  const std::span<std::byte> outputs = world_.staging(static_cast<size_t>(pairs * output_bytes));
  if (pairs > 0) {
    const int64_t workspace = expert_outputs_workspace_bytes(
        pairs, std::ssize(slots), slots.empty() ? 0 : slots[0].down.cols());
    expert_outputs(stream_, ConstTensorView(x, type, {rows, hidden}), x_rows_, slots_, slots,
                   TensorView(outputs.data(), DType::kF32, {pairs, hidden}),
                   workspace_.take(static_cast<size_t>(workspace)));
  }
  size_t begin = 0;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    const auto bytes = static_cast<size_t>(messages[rank].num_pairs() * output_bytes);
    to_each_[rank] = outputs.subspan(begin, bytes);
    begin += bytes;
  }
}

void ExpertExchange::combine(int64_t per_row, TensorView out) {
  const std::span<const ConstBytes> outputs = world_.meet(Collective::kCombine, to_each_);
  const int64_t hidden = out.size(1);
  for (size_t rank = 0; rank < outputs.size(); ++rank) {
    const size_t expected =
        requests_[rank].slots.size() * static_cast<size_t>(hidden) * sizeof(float);
    if (outputs[rank].size() != expected) {
      world_.fail_bytes(static_cast<int>(rank), outputs[rank].size(), expected);
    }
  }
  terms_.clear();
  for (const Origin& origin : origins_) {
    const auto* const of_rank =
        reinterpret_cast<const float*>(outputs[static_cast<size_t>(origin.rank)].data());
    terms_.push_back({of_rank + origin.pair * hidden, origin.weight});
  }
  add_expert_outputs(stream_, terms_, per_row, out);
}

}  // namespace fathom
