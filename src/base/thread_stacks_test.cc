#include "base/thread_stacks.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

namespace fathom {

// Outside the unnamed namespace: only exported functions have names.
[[gnu::noinline]] void wait_in_a_named_place(std::mutex& mutex) {
  const std::lock_guard lock(mutex);
}
struct Held {
  std::atomic<bool> goes_on = false;
  std::atomic<pid_t> id = 0;
};
[[gnu::noinline]] void spin_in_a_named_place(Held& held) {
  held.id = gettid();
  while (!held.goes_on) {
  }
}

namespace {

using namespace std::chrono_literals;

const ThreadStack* stack_of(const std::vector<ThreadStack>& stacks, pid_t thread) {
  const auto it = std::find_if(stacks.begin(), stacks.end(), [&](const ThreadStack& stack) {
    return std::ranges::count(stack.threads, thread) > 0;
  });
  return it == stacks.end() ? nullptr : &*it;
}

bool names(const ThreadStack& stack, std::string_view function) {
  return std::ranges::any_of(stack.frames, [&](const std::string& frame) {
    return frame.find(function) != std::string::npos;
  });
}

TEST(ThreadStacks, NameWhatEachThreadIsIn) {
  Held spinning;
  std::thread thread([&] { spin_in_a_named_place(spinning); });
  while (spinning.id == 0) std::this_thread::yield();
  for (int round = 0; round < 3; ++round) {
    const auto stacks = thread_stacks(5s);
    const ThreadStack* other = stack_of(stacks, spinning.id);
    ASSERT_NE(other, nullptr);
    EXPECT_TRUE(names(*other, "fathom::spin_in_a_named_place"));
    const ThreadStack* own = stack_of(stacks, gettid());
    ASSERT_NE(own, nullptr);
    EXPECT_TRUE(names(*own, "fathom::thread_stacks"));
  }
  spinning.goes_on = true;
  thread.join();
}

TEST(ThreadStacks, JoinThreadsThatAreAtOnePlace) {
  std::mutex held;
  std::vector<std::thread> threads;
  std::unique_lock lock(held);
  for (int i = 0; i < 5; ++i) threads.emplace_back([&] { wait_in_a_named_place(held); });
  size_t together = 0;
  for (int round = 0; round < 1000 && together < 5; ++round) {
    std::this_thread::sleep_for(5ms);  // until all threads wait there
    for (const ThreadStack& stack : thread_stacks(5s)) {
      if (names(stack, "fathom::wait_in_a_named_place")) together = stack.threads.size();
    }
  }
  EXPECT_EQ(together, 5u);
  lock.unlock();
  for (std::thread& thread : threads) thread.join();
}

TEST(ThreadStacks, DoNotWaitForThreadsThatBlockTheSignal) {
  Held blocking;
  std::thread thread([&] {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    blocking.id = gettid();
    while (!blocking.goes_on) std::this_thread::sleep_for(1ms);
    sigset_t none;  // the pending signal is delivered now, when nobody waits for its answer
    sigemptyset(&none);
    pthread_sigmask(SIG_SETMASK, &none, nullptr);
  });
  while (blocking.id == 0) std::this_thread::yield();
  const auto start = std::chrono::steady_clock::now();
  const auto stacks = thread_stacks(800ms);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 30s);
  const ThreadStack* silent = stack_of(stacks, blocking.id);
  ASSERT_NE(silent, nullptr);
  EXPECT_TRUE(silent->frames.empty());
  EXPECT_FALSE(stack_of(stacks, gettid())->frames.empty());
  blocking.goes_on = true;
  thread.join();
  EXPECT_FALSE(stack_of(thread_stacks(800ms), gettid())->frames.empty());
}

}  // namespace
}  // namespace fathom
