// The same product by cuBLASLt, for benchmarks to be compared with: loaded where it is installed,
// never linked.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "ops/linear/linear_cuda.h"

namespace fathom::cuda {

class CublasLt {
 public:
  CublasLt();  // tries $FATHOM_CUBLASLT, then libcublasLt.so.13
  ~CublasLt();

  bool found() const;
  // One batch, bf16 result, dense; the first algorithm that the library proposes.
  void multiply(const LinearArguments& arguments, cudaStream_t stream);

 private:
  struct Library;
  std::unique_ptr<Library> library_;
};

}  // namespace fathom::cuda
