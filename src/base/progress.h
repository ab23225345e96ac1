// A progress bar on stderr: one line that is redrawn on a terminal, otherwise a plain line per 10
// %. Owned by the thread that created it; add() may be called from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace fathom {

class Progress {
 public:
  enum class Unit { kBytes, kItems };

  // `what` precedes the bar, for example "Loading weights". With total 0 nothing is drawn.
  Progress(std::string what, int64_t total, Unit unit);
  ~Progress();  // draws the final state and ends the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void add(int64_t amount);

 private:
  void draw(bool last);

  const std::string what_;
  const int64_t total_;
  const Unit unit_;
  const bool terminal_;
  const std::chrono::steady_clock::time_point start_;
  std::atomic<int64_t> done_{0};
  std::mutex drawing_;
  std::chrono::steady_clock::time_point last_drawn_;
  int tenths_drawn_ = 0;
};

}  // namespace fathom
