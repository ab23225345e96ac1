#include "base/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

namespace fathom {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
constexpr int kBarWidth = 30;

std::string duration(double seconds) {
  if (seconds < 60) return fmt::format("{:.0f} s", seconds);
  const auto whole = static_cast<int64_t>(seconds);
  if (seconds < 3600) return fmt::format("{}:{:02} min", whole / 60, whole % 60);
  return fmt::format("{}:{:02} h", whole / 3600, whole / 60 % 60);
}

}  // namespace

Progress::Progress(std::string what, int64_t total, Unit unit)
    : what_(std::move(what)),
      total_(total),
      unit_(unit),
      terminal_(isatty(STDERR_FILENO) == 1),
      start_(Clock::now()),
      last_drawn_(start_) {}

Progress::~Progress() {
  if (total_ > 0) draw(true);
}

void Progress::add(int64_t amount) {
  done_ += amount;
  if (total_ <= 0) return;
  std::unique_lock lock(drawing_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  const auto now = Clock::now();
  if (terminal_) {
    if (now - last_drawn_ < std::chrono::milliseconds(100)) return;
  } else {
    // In a log file: at most ten lines, and none for work that ends within two seconds.
    const int tenths = static_cast<int>(done_ * 10 / total_);
    if (tenths <= tenths_drawn_ || tenths >= 10 || now - start_ < std::chrono::seconds(2)) return;
    tenths_drawn_ = tenths;
  }
  last_drawn_ = now;
  draw(false);
}

void Progress::draw(bool last) {
  const int64_t done = done_;
  const double elapsed = std::chrono::duration<double>(Clock::now() - start_).count();
  const double rate = elapsed > 0 ? static_cast<double>(done) / elapsed : 0;
  const double left = rate > 0 ? static_cast<double>(total_ - done) / rate : 0;
  const double fraction = static_cast<double>(done) / static_cast<double>(total_);
  const std::string amounts =
      unit_ == Unit::kBytes
          ? fmt::format("{:.2f}/{:.2f} GiB, {:.2f} GiB/s", static_cast<double>(done) / kGiB,
                        static_cast<double>(total_) / kGiB, rate / kGiB)
          : fmt::format("{}/{}, {:.1f}/s", done, total_, rate);
  const std::string time =
      last ? fmt::format("in {}", duration(elapsed)) : fmt::format("{} left", duration(left));
  std::string line;
  if (terminal_) {
    const int filled = static_cast<int>(fraction * kBarWidth);
    const std::string bar = std::string(static_cast<size_t>(filled), '#') +
                            std::string(static_cast<size_t>(kBarWidth - filled), '.');
    line = fmt::format("\r{} [{}] {:3.0f} % {}, {}\033[K{}", what_, bar, fraction * 100, amounts,
                       time, last ? "\n" : "");
  } else {
    line = fmt::format("{}: {:.0f} %, {}, {}\n", what_, fraction * 100, amounts, time);
  }
  std::fputs(line.c_str(), stderr);  // fmt::print would throw if stderr cannot be written
  std::fflush(stderr);
}

}  // namespace fathom
