#include "device/cuda/bench_table.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "device/cuda/graph_timer.h"

namespace fathom::cuda {
namespace {

// bf16 with fp32 sums on random data, measured on an H200.
constexpr double kFlopPerUs = 790e6;

}  // namespace

BenchTable::BenchTable(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) json_ = json_ || std::strcmp(argv[i], "--json") == 0;
  const std::string device = device_line();
  if (json_) {
    std::printf("{\"device\": \"%s\", \"results\": [", device.c_str());
  } else {
    std::printf("%s\n%-32s %-18s %9s %9s %6s %7s %8s\n", device.c_str(), "operation", "shape", "us",
                "floor us", "%", "GB/s", "TFLOP/s");
  }
}

BenchTable::~BenchTable() {
  if (json_) std::printf("\n]}\n");
}

void BenchTable::add(const std::string& operation, const std::string& shape, double us,
                     double bytes, double flop) {
  const double floor = std::max(bytes / kReadBytesPerUs, flop / kFlopPerUs);
  if (json_) {
    std::printf(
        "%s\n  {\"operation\": \"%s\", \"shape\": \"%s\", \"us\": %.3f, \"floor_us\": %.3f}",
        separator_, operation.c_str(), shape.c_str(), us, floor);
    separator_ = ",";
  } else {
    std::printf("%-32s %-18s %9.2f %9.2f %6.1f %7.0f %8.1f\n", operation.c_str(), shape.c_str(), us,
                floor, 100 * floor / us, bytes / us / 1e3, flop / us / 1e6);
  }
  std::fflush(stdout);
}

}  // namespace fathom::cuda
