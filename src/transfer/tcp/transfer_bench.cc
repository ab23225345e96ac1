// Bytes a second of pages over loopback, from one pool into another: each side is pinned to a CPU
// of its own, with its I/O thread and the thread that lends pages of its pool or takes them. Pages
// land in the receiver's pool, or come into buffers and are copied from there.
#include <benchmark/benchmark.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "base/pin_thread.h"
#include "transfer/tcp/prefill_peers.h"
#include "transfer/tcp/transfer_server.h"
#include "transfer/ucx/ucx_lane.h"

namespace fathom {
namespace {

constexpr int64_t kPages = 64;  // of a prompt of 4,096 tokens
constexpr int kPrefillCpu = 0;

std::string core_of(int cpu) {
  std::string core;
  std::ifstream(fmt::format("/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list", cpu)) >>
      core;
  return core;
}

// The first CPU of another core.
int decode_cpu() {
  for (int cpu = kPrefillCpu + 1; cpu < 1024; ++cpu) {
    const std::string core = core_of(cpu);
    if (!core.empty() && core != core_of(kPrefillCpu)) return cpu;
  }
  return kPrefillCpu + 1;
}

// Sends pages of its pool for each order, from a thread of its own.
class SendingLink : public PromptLink {
 public:
  SendingLink(std::shared_ptr<PieceReceiver> receiver, int64_t page_bytes)
      : receiver_(std::move(receiver)),
        pool_(static_cast<size_t>(kPages * page_bytes), std::byte{1}),
        thread_([this, page_bytes] { work(static_cast<size_t>(page_bytes)); }) {}
  ~SendingLink() override {
    stopping_ = true;
    ordered_.release();
    thread_.join();
  }
  Result<> order(PromptOrder order) override {
    ticket_ = order.ticket;
    ordered_.release();
    return {};
  }
  void cancel(const TicketId&) override {}
  bool holds(const TicketId&) override { return true; }

 private:
  void work(size_t page_bytes) {
    pin_thread(kPrefillCpu);
    for (;;) {
      ordered_.acquire();
      if (stopping_) return;
      for (int64_t page = 0; page < kPages; ++page) {
        const auto rows =
            std::span(pool_).subspan(static_cast<size_t>(page) * page_bytes, page_bytes);
        const PieceHeader header = make_piece(ticket_, page, rows);
        while (!receiver_->put(header, lend(std::make_shared<LentRows>(rows)))) {
          if (stopping_) return;
          std::this_thread::sleep_for(std::chrono::milliseconds(1));  // as the engine does
        }
      }
      receiver_->done(ticket_.id);
    }
  }

  std::shared_ptr<PieceReceiver> receiver_;
  std::vector<std::byte> pool_;
  Ticket ticket_;
  std::counting_semaphore<> ordered_{0};
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

// Every piece may land in a pool, whose page it names.
class Pool : public LandingBook {
 public:
  Pool(int64_t page_bytes, uint64_t digest_seed)
      : page_bytes_(page_bytes),
        digest_seed_(digest_seed),
        rows_(static_cast<size_t>(kPages * page_bytes)) {}
  std::optional<LandingPlace> begin_landing(const PieceHeader& header) override {
    return LandingPlace{.rows = page(header.page), .digest_seed = digest_seed_};
  }
  void copy(const PagePiece& piece) {
    FATHOM_CHECK(digest_seed_ == 0 ||
                     piece.header.digest == piece_digest(digest_seed_, piece.header, piece.rows),
                 "another digest");
    std::memcpy(page(piece.header.page).data(), piece.rows.data(), piece.rows.size());
  }

 private:
  std::span<std::byte> page(int64_t number) {
    return std::span(rows_).subspan(static_cast<size_t>(number * page_bytes_),
                                    static_cast<size_t>(page_bytes_));
  }
  const int64_t page_bytes_;
  const uint64_t digest_seed_;
  std::vector<std::byte> rows_;
};

void BM_Transfer(benchmark::State& state) {
  const int64_t page_bytes = state.range(0);
  const uint64_t digest_seed = state.range(1) != 0 ? 7 : 0;
  const bool lands = state.range(4) != 0;
  const bool by_ucx = state.range(3) != 0;
  if (const auto usable = check_ucx(); by_ucx && !usable) {
    return state.SkipWithError(usable.error().message.c_str());
  }
  const MakeLane lane = by_ucx ? MakeLane(make_ucx_lane) : nullptr;
  set_log_level(LogLevel::kError);
  pin_thread(kPrefillCpu);
  TransferServerOptions options;
  options.listen = {.host = "127.0.0.1", .port = 0};
  options.form = 1;
  options.page_bytes = page_bytes;
  options.max_tokens = kPages * 64;
  options.make_lane = lane;
  auto server =
      *TransferServer::create(options, [page_bytes](std::shared_ptr<PieceReceiver> receiver) {
        return std::make_shared<SendingLink>(std::move(receiver), page_bytes);
      });
  pin_thread(decode_cpu());
  const auto mailbox = std::make_shared<PieceMailbox>(int64_t{64} << 20);
  PrefillPeers peers({.peers = {server->endpoint()},
                      .page_bytes = page_bytes,
                      .streams = state.range(2),
                      .make_lane = lane},
                     mailbox);
  while (peers.stats().ready == 0) std::this_thread::yield();
  Pool pool(page_bytes, digest_seed);
  if (lands) mailbox->set_landings(&pool);
  PieceMailbox::News news;
  std::counting_semaphore<> arrived{0};
  mailbox->watch([&] { arrived.release(); });
  uint64_t number = 0;
  for (auto _ : state) {
    PromptOrder order;
    order.ticket = {.id = {1, 1, ++number},
                    .num_pages = kPages,
                    .page_bytes = page_bytes,
                    .form = 1,
                    .digest_seed = digest_seed};
    order.tokens.resize(kPages * 64);
    const Ticket ticket = order.ticket;
    FATHOM_CHECK(peers.order(std::move(order)), "the order was refused");
    for (int64_t came = 0; came < kPages;) {
      arrived.acquire();
      mailbox->take(news);
      FATHOM_CHECK(lands ? news.pieces.empty() : news.landed.empty(), "a piece came another way");
      for (const PagePiece& piece : news.pieces) pool.copy(piece);
      for (const LandedPiece& piece : news.landed) {
        FATHOM_CHECK(piece.how == Landed::kWritten, "a page has not landed");
      }
      came += std::ssize(news.pieces) + std::ssize(news.landed);
    }
    peers.cancel(ticket.id);
  }
  mailbox->set_landings(nullptr);
  mailbox->watch(nullptr);
  FATHOM_CHECK(by_ucx == (peers.stats().lane_pieces_received > 0), "pieces went another way");
  state.SetBytesProcessed(state.iterations() * kPages * page_bytes);
}
// Pages of the bundled model (590 KB), of V2-Lite (2.0 MB) and of V3 in bf16 (4.5 MB).
BENCHMARK(BM_Transfer)
    ->ArgNames({"page_bytes", "digests", "streams", "ucx", "lands"})
    ->ArgsProduct({{589'824}, {0}, {1, 2, 4}, {0, 1}, {1}})
    ->ArgsProduct({{589'824}, {1}, {2}, {0, 1}, {1}})
    ->ArgsProduct({{1'990'656, 4'497'408}, {0}, {2}, {0, 1}, {1}})
    ->ArgsProduct({{589'824, 4'497'408}, {0}, {2}, {0, 1}, {0}})
    ->Unit(benchmark::kMillisecond)
    ->MeasureProcessCPUTime()  // of both sides
    ->UseRealTime();

}  // namespace
}  // namespace fathom
