// A build without CUDA.
#include "engine/gpu_presence.h"
#include "engine/gpu_runner.h"

namespace fathom {
namespace {

tl::unexpected<Status> not_in_this_build() {
  return error(
      Code::kInvalidArgument,
      "this program was built without CUDA: --device cpu, or build where nvcc 13 is found");
}

}  // namespace

void expect_gpu_ranks() {}

int num_gpus() { return 0; }

std::string why_no_gpu(const std::string& root) {
  return shows_gpu(root) ? "this program was built without CUDA" : "";
}

Result<GpuMemory> gpu_memory(const Checkpoint&, const GpuRunnerOptions&) {
  return not_in_this_build();
}

Result<GpuRates> measure_gpu(int) { return not_in_this_build(); }

std::string gpu_name(int) { return ""; }

std::string cublas_lt_version() { return ""; }

Result<std::unique_ptr<Runner>> create_gpu_runner(const Checkpoint&, const GpuRunnerOptions&) {
  return not_in_this_build();
}

}  // namespace fathom
