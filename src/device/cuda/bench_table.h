// The table that a benchmark of GPU operations prints: time, rates, and their share of this GPU's
// read and multiply rates; for people or, with --json, for bench/results.
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

  // Adds one line. `bytes` and `flop` are the least that the operation must move and do; the floor
  // (roofline) is the larger of their times at kReadBytesPerUs and kFlopPerUs.
  void add(const std::string& operation, const std::string& shape, double us, double bytes,
           double flop = 0);

 private:
  bool json_ = false;
  const char* separator_ = "";
};

}  // namespace fathom::cuda
