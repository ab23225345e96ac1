// The table that a benchmark of GPU operations prints: time, rates, and how much of what this GPU
// can read or multiply they are; for people or, with --json, for bench/results.
#pragma once

#include <string>

namespace fathom::cuda {

class BenchTable {
 public:
  // Recognises --json among the arguments. Prints the head.
  BenchTable(int argc, char** argv);
  ~BenchTable();
  BenchTable(const BenchTable&) = delete;
  BenchTable& operator=(const BenchTable&) = delete;

  // One line. `bytes` and `flop` are what the operation must at least move and do; the floor is the
  // larger of their times at kReadBytesPerUs and kFlopPerUs.
  void add(const std::string& operation, const std::string& shape, double us, double bytes,
           double flop = 0);

 private:
  bool json_ = false;
  const char* separator_ = "";
};

}  // namespace fathom::cuda
