#include "transfer/ucx/ucx_lane.h"

#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/entropy.h"
#include "base/random.h"
#include "transfer/ucx/ucx_api.h"

namespace fathom {
namespace {

// A piece is two messages, both read by the receiver where they lie: its rows, and the seal behind
// them, which is read when the rows have been. So the rows need no room for it where they go.
enum Message : unsigned { kRowsMessage = 1, kSealMessage = 2 };

// What goes before the rows, and before the seal.
struct MessageHead {
  uint64_t key = 0;
  uint64_t seal = 0;
  std::array<std::byte, kPieceHeaderBytes> piece{};
};
static_assert(sizeof(MessageHead) == 16 + kPieceHeaderBytes);
constexpr size_t kSealBytes = sizeof(uint64_t);

// Where the rows that are being sent lie, and the seal behind them: the other end reads them there,
// whenever it likes. Once they are unmapped it finds an error or another seal, and gives the piece
// up.
class Staging {
 public:
  Staging() = default;
  ~Staging() {
    if (memory_ != nullptr) munmap(memory_, bytes_);
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  Result<std::byte*> get(size_t bytes) {
    if (memory_ != nullptr) return static_cast<std::byte*>(memory_);
    void* const memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      return error(Code::kResourceExhausted, "no memory for a page of {} bytes to be sent", bytes);
    }
    memory_ = memory;
    bytes_ = bytes;
    return static_cast<std::byte*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

class UcxLane : public PieceLane {
 public:
  UcxLane(const UcxApi& api, int64_t page_bytes, uint64_t key)
      : api_(api), page_bytes_(static_cast<size_t>(page_bytes)), key_(key) {}
  // What is under way is given up.
  ~UcxLane() override {
    if (worker_ != nullptr) api_.worker_destroy(worker_);
  }

  Result<> open();

  std::span<const std::byte> address() const override { return address_; }
  Result<> connect(std::span<const std::byte> other_end) override;
  int event_fd() const override { return event_fd_; }
  Result<bool> progress() override;
  Result<> send(std::span<const std::byte, kPieceHeaderBytes> header,
                std::span<const std::byte> rows) override;
  bool is_sending() const override { return num_sending_ > 0; }
  std::optional<Offer> offer() const override;
  Result<> receive(std::span<std::byte> rows) override;
  bool has_received() override { return std::exchange(has_received_, false); }

 private:
  static UcxLane& of(void* lane) { return *static_cast<UcxLane*>(lane); }
  static void on_lost(void* lane, ucp_ep_h endpoint, ucs_status_t status);
  static void on_sent(void* request, ucs_status_t status, void* lane);
  static void on_received(void* request, ucs_status_t status, size_t bytes, void* lane);
  template <Message kKind>
  static ucs_status_t on_message(void* lane, const void* head, size_t head_bytes, void* data,
                                 size_t bytes, const ucp_am_recv_param_t* param);
  ucs_status_t set_handler(Message kind, ucp_am_recv_callback_t callback);
  void begin_send(Message kind, std::span<const std::byte> data);
  void end_send(ucs_status_t status);
  void begin_receive(void* data, std::span<std::byte> to);
  void end_receive(ucs_status_t status, size_t bytes);
  void take_message(Message kind, const void* head, size_t head_bytes, void* data, size_t bytes,
                    bool is_offer);
  // The first failure is the one that is told.
  void fail(Status why) {
    if (!failure_) failure_ = std::move(why);
  }
  void fail(std::string_view what, ucs_status_t status) {
    fail({Code::kUnavailable, fmt::format("UCX, {}: {}", what, api_.status_string(status))});
  }
  Result<> result() const {
    if (failure_) return tl::unexpected(*failure_);
    return {};
  }

  const UcxApi& api_;
  const size_t page_bytes_;
  const uint64_t key_;
  ucp_worker_h worker_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
  int event_fd_ = -1;
  std::vector<std::byte> address_;
  std::optional<Status> failure_;

  Staging staging_;
  MessageHead sending_;
  int num_sending_ = 0;  // messages

  struct Offered {
    MessageHead head = {};
    void* data = nullptr;  // UCX's name of it
    size_t bytes = 0;
  };
  // State of the piece. Its seal may be offered in each state but the first and the last.
  enum class State { kNone, kOffered, kReadingRows, kRead, kReadingSeal };
  State state_ = State::kNone;
  Offered rows_;
  void* seal_data_ = nullptr;  // UCX's name of it; null: it is not offered, or taken
  uint64_t seal_ = 0;          // as it is read
  size_t expected_bytes_ = 0;  // of what is being read
  bool has_received_ = false;
};

Result<> UcxLane::open() {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SINGLE;
  ucs_status_t status = api_.worker_create(api_.context, &params, &worker_);
  if (status != UCS_OK) {
    worker_ = nullptr;
    fail("a worker", status);
    return result();
  }
  status = set_handler(kRowsMessage, on_message<kRowsMessage>);
  if (status == UCS_OK) status = set_handler(kSealMessage, on_message<kSealMessage>);
  if (status == UCS_OK) status = api_.worker_get_efd(worker_, &event_fd_);
  ucp_address_t* address = nullptr;
  size_t bytes = 0;
  if (status == UCS_OK) status = api_.worker_get_address(worker_, &address, &bytes);
  if (status != UCS_OK) {
    fail("a worker's events and address", status);
    return result();
  }
  const auto* const begin = reinterpret_cast<const std::byte*>(address);
  address_.assign(begin, begin + bytes);
  api_.worker_release_address(worker_, address);
  if (bytes > kMaxLaneAddressBytes) {
    return error(Code::kUnavailable, "UCX's address has {} bytes, at most {} are sent (UCX_TLS)",
                 bytes, kMaxLaneAddressBytes);
  }
  return {};
}

ucs_status_t UcxLane::set_handler(Message kind, ucp_am_recv_callback_t callback) {
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kind;
  handler.cb = callback;
  handler.arg = this;
  return api_.worker_set_am_recv_handler(worker_, &handler);
}

Result<> UcxLane::connect(std::span<const std::byte> other_end) {
  FATHOM_CHECK(endpoint_ == nullptr, "it is connected");
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(other_end.data());
  params.err_handler.cb = on_lost;
  params.err_handler.arg = this;
  const ucs_status_t status = api_.ep_create(worker_, &params, &endpoint_);
  if (status != UCS_OK) {
    endpoint_ = nullptr;
    fail("the other end", status);
  }
  return result();
}

Result<bool> UcxLane::progress() {
  bool has_done = api_.worker_progress(worker_) != 0;
  if (!failure_ && state_ == State::kRead && seal_data_ != nullptr) {
    state_ = State::kReadingSeal;
    begin_receive(std::exchange(seal_data_, nullptr), std::as_writable_bytes(std::span(&seal_, 1)));
    has_done = true;
  }
  if (failure_) return tl::unexpected(*failure_);
  if (has_done) return true;
  const ucs_status_t status = api_.worker_arm(worker_);
  if (status == UCS_ERR_BUSY) return true;
  if (status != UCS_OK) {
    fail("waiting", status);
    return tl::unexpected(*failure_);
  }
  return false;
}

Result<> UcxLane::send(std::span<const std::byte, kPieceHeaderBytes> header,
                       std::span<const std::byte> rows) {
  FATHOM_CHECK(num_sending_ == 0, "one piece at a time");
  if (rows.empty() || rows.size() > page_bytes_) {
    return invalid("a piece has {} bytes of rows, must have 1 to {}", rows.size(), page_bytes_);
  }
  FATHOM_TRY(std::byte* const memory, staging_.get(page_bytes_ + kSealBytes));
  sending_.key = key_;
  sending_.seal = unpredictable_bits();
  std::copy(header.begin(), header.end(), sending_.piece.begin());
  std::memcpy(memory, rows.data(), rows.size());
  std::memcpy(memory + rows.size(), &sending_.seal, kSealBytes);
  const std::span<const std::byte> all(memory, rows.size() + kSealBytes);
  begin_send(kRowsMessage, all.first(rows.size()));
  begin_send(kSealMessage, all.last(kSealBytes));
  return result();
}

void UcxLane::begin_send(Message kind, std::span<const std::byte> data) {
  if (failure_) return;
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_RNDV;
  param.cb.send = on_sent;
  param.user_data = this;
  ++num_sending_;
  void* const request =
      api_.am_send(endpoint_, kind, &sending_, sizeof sending_, data.data(), data.size(), &param);
  if (request == nullptr || UCS_PTR_IS_ERR(request)) end_send(UCS_PTR_STATUS(request));
}

void UcxLane::on_lost(void* lane, ucp_ep_h /*endpoint*/, ucs_status_t status) {
  of(lane).fail("the other end is lost", status);
}

void UcxLane::on_sent(void* request, ucs_status_t status, void* lane) {
  UcxLane& self = of(lane);
  self.api_.request_free(request);
  self.end_send(status);
}

void UcxLane::end_send(ucs_status_t status) {
  --num_sending_;
  if (status != UCS_OK) fail("a piece is not sent", status);
}

template <Message kKind>
ucs_status_t UcxLane::on_message(void* lane, const void* head, size_t head_bytes, void* data,
                                 size_t bytes, const ucp_am_recv_param_t* param) {
  const bool is_offer = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  of(lane).take_message(kKind, head, head_bytes, data, bytes, is_offer);
  // UCX keeps an offer until it is received, or drops it.
  return is_offer && !of(lane).failure_ ? UCS_INPROGRESS : UCS_OK;
}

void UcxLane::take_message(Message kind, const void* head, size_t head_bytes, void* data,
                           size_t bytes, bool is_offer) {
  if (failure_) return;
  const auto refuse = [&](std::string_view why) {
    fail({Code::kInvalidArgument, fmt::format("a message of {} + {} bytes through shared memory {}",
                                              head_bytes, bytes, why)});
  };
  Offered offered{.data = data, .bytes = bytes};
  if (head_bytes != sizeof offered.head || !is_offer || bytes == 0) return refuse("is no piece");
  std::memcpy(&offered.head, head, sizeof offered.head);
  if (offered.head.key != key_) return refuse("is not the other end's");
  if (kind == kSealMessage) {
    if (bytes != kSealBytes || state_ == State::kNone || state_ == State::kReadingSeal ||
        seal_data_ != nullptr) {
      return refuse("is no seal of a piece");
    }
    seal_data_ = data;
    return;
  }
  if (bytes > page_bytes_) return refuse("is larger than a page");
  if (state_ != State::kNone) return refuse("comes before the one before it was taken");
  rows_ = offered;
  state_ = State::kOffered;
}

std::optional<PieceLane::Offer> UcxLane::offer() const {
  if (state_ != State::kOffered) return std::nullopt;
  return Offer{.header = rows_.head.piece, .bytes = rows_.bytes};
}

Result<> UcxLane::receive(std::span<std::byte> rows) {
  FATHOM_CHECK(state_ == State::kOffered && rows.size() == rows_.bytes,
               "a piece of {} bytes is taken into {}", rows_.bytes, rows.size());
  state_ = State::kReadingRows;
  begin_receive(rows_.data, rows);
  return result();
}

void UcxLane::begin_receive(void* data, std::span<std::byte> to) {
  expected_bytes_ = to.size();
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.recv_am = on_received;
  param.user_data = this;
  void* const request = api_.am_recv_data(worker_, data, to.data(), to.size(), &param);
  if (request == nullptr) {
    end_receive(UCS_OK, to.size());
  } else if (UCS_PTR_IS_ERR(request)) {
    end_receive(UCS_PTR_STATUS(request), 0);
  }
}

void UcxLane::on_received(void* request, ucs_status_t status, size_t bytes, void* lane) {
  UcxLane& self = of(lane);
  self.api_.request_free(request);
  self.end_receive(status, bytes);
}

void UcxLane::end_receive(ucs_status_t status, size_t bytes) {
  if (status != UCS_OK) return fail("a piece is not received", status);
  const bool is_whole = bytes == expected_bytes_;
  if (state_ == State::kReadingRows && is_whole) {
    state_ = State::kRead;
    return;
  }
  if (!is_whole || seal_ != rows_.head.seal) {
    return fail({Code::kUnavailable, "the other end has given up a piece while it was read"});
  }
  state_ = State::kNone;
  has_received_ = true;
}

}  // namespace

Result<> check_ucx() {
  const auto api = ucx_api();
  if (!api) return tl::unexpected(api.error());
  return {};
}

Result<std::unique_ptr<PieceLane>> make_ucx_lane(int64_t page_bytes, uint64_t key) {
  FATHOM_TRY(const UcxApi* const api, ucx_api());
  auto lane = std::make_unique<UcxLane>(*api, page_bytes, key);
  FATHOM_RETURN_IF_ERROR(lane->open());
  return std::unique_ptr<PieceLane>(std::move(lane));
}

}  // namespace fathom
