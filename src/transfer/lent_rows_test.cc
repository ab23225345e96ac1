#include "transfer/lent_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>

namespace fathom {
namespace {

std::vector<std::byte> bytes_of(int value) {
  return std::vector<std::byte>(1000, static_cast<std::byte>(value));
}

bool all_are(std::span<const std::byte> rows, int value) {
  return std::all_of(rows.begin(), rows.end(),
                     [&](std::byte byte) { return byte == static_cast<std::byte>(value); });
}

TEST(LentRows, TheReaderReadsTheLendersMemory) {
  const auto page = bytes_of(3);
  const auto loan = std::make_shared<LentRows>(std::span(page));
  EXPECT_FALSE(loan->is_own());
  EXPECT_FALSE(loan->is_lent());
  auto reader = lend(loan);
  auto second = reader;
  reader->read([&](std::span<const std::byte> rows) { EXPECT_EQ(rows.data(), page.data()); });
  reader = nullptr;
  EXPECT_TRUE(loan->is_lent()) << "another handle is left";
  second = nullptr;
  EXPECT_FALSE(loan->is_lent());
}

TEST(LentRows, AfterARecallTheReaderHasACopy) {
  auto page = bytes_of(3);
  const auto loan = std::make_shared<LentRows>(std::span(page));
  const auto reader = lend(loan);
  loan->recall();
  std::fill(page.begin(), page.end(), std::byte{9});
  EXPECT_TRUE(loan->is_lent());
  EXPECT_EQ(reader->size(), page.size());
  reader->read([&](std::span<const std::byte> rows) {
    EXPECT_EQ(rows.size(), page.size());
    EXPECT_TRUE(all_are(rows, 3));
  });
}

TEST(LentRows, MemoryOfItsOwnIsLentAgain) {
  const auto loan = std::make_shared<LentRows>(bytes_of(1));
  EXPECT_TRUE(loan->is_own());
  lend(loan);
  EXPECT_FALSE(loan->is_lent());
  std::ranges::fill(loan->own(), std::byte{2});
  const auto reader = lend(loan);
  EXPECT_TRUE(loan->is_lent());
  reader->read([](std::span<const std::byte> rows) { EXPECT_TRUE(all_are(rows, 2)); });
}

// The lender writes its page as soon as recall() has returned, while the reader reads and reads.
TEST(LentRows, ARecallWaitsForTheReader) {
  for (int round = 0; round < 200; ++round) {
    auto page = bytes_of(3);
    const auto loan = std::make_shared<LentRows>(std::span(page));
    std::atomic<bool> reads = false, wrong = false, ends = false;
    std::thread thread([&, reader = lend(loan)] {
      while (!ends) {
        reader->read([&](std::span<const std::byte> rows) {
          reads = true;
          if (!all_are(rows, 3)) wrong = true;
        });
      }
    });
    while (!reads) std::this_thread::yield();
    loan->recall();
    std::fill(page.begin(), page.end(), std::byte{9});
    ends = true;
    thread.join();
    EXPECT_FALSE(wrong);
  }
}

}  // namespace
}  // namespace fathom
