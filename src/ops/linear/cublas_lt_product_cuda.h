// linear (linear_cuda.h) by NVIDIA's cuBLASLt: loaded at run time where it is installed, never
// linked.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "ops/linear/linear_cuda.h"

namespace fathom::cuda {

// The version of the library that $FATHOM_CUBLASLT names, otherwise of libcublasLt.so.13 where the
// loader or CUDA's own folder has it: "13.1.0"; empty if there is none.
std::string cublas_lt_version();

// Algorithms are chosen once for each class of row counts (library_plan.h) and kept: a query costs
// 150 us on the host, loading its kernel 2 ms and up to 100 MB in all. For one thread and one
// stream.
class CublasLt {
 public:
  static constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

  // `workspace`: kWorkspaceBytes of the current device's memory, used by these GEMMs only. Null
  // where the library is not installed.
  static std::unique_ptr<CublasLt> load(void* workspace);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  // Enqueues one launch or two; returns false where the library has no algorithm for these sizes.
  // Takes the first proposed algorithm whose sums have a fixed order, so the same arguments give
  // bitwise identical results. Can be captured.
  bool multiply(const LinearArguments& arguments, cudaStream_t stream);

 private:
  struct Product;
  struct Key {
    int32_t rows_alike, n, k, batches;
    int64_t x_row_stride, x_batch_stride, out_row_stride, out_batch_stride;
    DType out_type;

    friend auto operator<=>(const Key&, const Key&) = default;
  };

  CublasLt(void* handle, void* workspace);
  std::unique_ptr<Product> choose(const LinearArguments& arguments, int32_t rows) const;

  void* handle_;
  void* workspace_;
  std::map<Key, std::unique_ptr<Product>> products_;
};

}  // namespace fathom::cuda
