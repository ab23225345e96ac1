#include "engine/step_watchdog.h"

#include <gtest/gtest.h>

#include <future>

namespace fathom {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLong(600'000), kShort(20);

struct Expiry {
  std::promise<std::string> said;
  std::future<std::string> what = said.get_future();
  StepWatchdog::Expired expired = [this](const std::string& text, std::chrono::nanoseconds) {
    said.set_value(text);
  };
};

TEST(StepWatchdog, SaysWhatDidNotEnd) {
  Expiry expiry;
  StepWatchdog watchdog(expiry.expired);
  const StepWatchdog::Watch watch(watchdog, "step 1", kShort);
  EXPECT_EQ(expiry.what.get(), "step 1");
}

TEST(StepWatchdog, SaysTheLatestOfSeveral) {
  Expiry expiry;
  StepWatchdog watchdog(expiry.expired);
  for (int i = 0; i < 1000; ++i) const StepWatchdog::Watch watch(watchdog, "a step", kLong);
  const StepWatchdog::Watch watch(watchdog, "step 2", kShort);
  EXPECT_EQ(expiry.what.get(), "step 2");
}

// Independent of the machine's load: limits that must not expire are 10 minutes, and an expected
// expiry is waited for.
TEST(StepWatchdog, IsQuietWhenAllHasEnded) {
  Expiry expiry;
  StepWatchdog watchdog(expiry.expired);
  { const StepWatchdog::Watch watch(watchdog, "step 1", kLong); }
  {
    const StepWatchdog::Watch watch(watchdog, "step 2", milliseconds(0));  // no limit
    EXPECT_EQ(expiry.what.wait_for(milliseconds(50)), std::future_status::timeout);
  }
  const StepWatchdog::Watch watch(watchdog, "step 3", kShort);
  EXPECT_EQ(expiry.what.get(), "step 3");
}

TEST(StepWatchdogDeathTest, EndsTheProcessWithStatus3AndNamesTheStep) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        StepWatchdog watchdog;
        const StepWatchdog::Watch watch(watchdog, "step 7 of 16 rows", kShort);
        std::this_thread::sleep_for(std::chrono::hours(1));
      },
      testing::ExitedWithCode(StepWatchdog::kExitStuck),
      "step 7 of 16 rows has not ended within 0.02 s");
}

}  // namespace
}  // namespace fathom
