// Pieces on their way into a page: how each ends is told once, and none lands in an engine that
// goes.
#include "transfer/landing.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "transfer/piece_mailbox.h"

namespace fathom {
namespace {

using namespace std::chrono_literals;

// A page for the pieces of one ticket.
class OnePage : public LandingBook {
 public:
  std::optional<LandingPlace> begin_landing(const PieceHeader& header) override {
    if (header.ticket != ticket.id) return std::nullopt;
    return LandingPlace{.rows = page, .digest_seed = ticket.digest_seed};
  }
  Ticket ticket = {.id = {1, 2, 3}, .num_pages = 1, .page_bytes = 64, .digest_seed = 9};
  std::vector<std::byte> page = std::vector<std::byte>(64);
};

struct Landings : testing::Test {
  ~Landings() override { mailbox->set_landings(nullptr); }
  std::vector<Landed> told() {
    mailbox->take(news);
    std::vector<Landed> ends;
    for (const LandedPiece& piece : news.landed) ends.push_back(piece.how);
    return ends;
  }
  OnePage book;
  std::shared_ptr<PieceMailbox> mailbox = std::make_shared<PieceMailbox>(1);
  PieceMailbox::News news;
  const std::vector<std::byte> rows = std::vector<std::byte>(64, std::byte{7});
  const PieceHeader header = make_piece(book.ticket, 0, rows);
};

TEST_F(Landings, EachEndIsToldOnce) {
  EXPECT_EQ(mailbox->land(header), nullptr) << "there is no book";
  mailbox->set_landings(&book);
  PieceHeader other = header;
  ++other.ticket.number;
  EXPECT_EQ(mailbox->land(other), nullptr);
  EXPECT_TRUE(told().empty());

  auto landing = mailbox->land(header);
  ASSERT_NE(landing, nullptr);
  ASSERT_EQ(landing->rows().data(), book.page.data());
  EXPECT_TRUE(told().empty()) << "it is landing";
  std::copy(rows.begin(), rows.end(), landing->rows().begin());
  landing->finish();
  landing = nullptr;
  EXPECT_EQ(told(), std::vector{Landed::kWritten});
  EXPECT_EQ(news.landed.front().header.ticket, book.ticket.id);

  landing = mailbox->land(header);
  landing->rows()[63] = std::byte{8};
  landing->finish();
  landing = nullptr;
  EXPECT_EQ(told(), std::vector{Landed::kWrongDigest});

  landing = mailbox->land(header);
  landing = nullptr;
  EXPECT_EQ(told(), std::vector{Landed::kBroken});
  EXPECT_TRUE(told().empty());
}

TEST_F(Landings, AnEngineThatGoesWaitsForWhatLands) {
  mailbox->set_landings(&book);
  auto landing = mailbox->land(header);
  std::atomic<bool> is_asked{false}, is_broken{false};
  mailbox->watch_breaks([&] { is_asked = true; });
  std::thread receiver([&] {
    while (!is_asked) std::this_thread::sleep_for(1ms);
    EXPECT_EQ(mailbox->land(header), nullptr) << "nothing lands any more";
    std::this_thread::sleep_for(20ms);  // time for set_landings() not to wait
    is_broken = true;
    landing = nullptr;
  });
  mailbox->set_landings(nullptr);
  EXPECT_TRUE(is_broken);
  receiver.join();
  mailbox->watch_breaks(nullptr);
  EXPECT_EQ(told(), std::vector{Landed::kBroken});
}

}  // namespace
}  // namespace fathom
