#include "ops/linear/cublas_lt_product_cuda.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <cstdlib>

#include "device/cuda/device_array.h"
#include "device/cuda/error.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kWorkspaceBytes = 32 << 20;

void check_lt(cublasStatus_t status, const char* what) {
  check(status == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorUnknown, what);
}

}  // namespace

struct CublasLt::Library {
  template <typename Function>
  Function* find(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(handle, name));
  }

  void* handle = nullptr;
  cublasLtHandle_t lt = nullptr;
  DeviceArray<uint8_t> workspace{kWorkspaceBytes};
};

CublasLt::CublasLt() : library_(std::make_unique<Library>()) {
  const char* path = std::getenv("FATHOM_CUBLASLT");
  library_->handle = dlopen(path != nullptr ? path : "libcublasLt.so.13", RTLD_NOW);
  if (library_->handle == nullptr) return;
  check_lt(library_->find<decltype(cublasLtCreate)>("cublasLtCreate")(&library_->lt),
           "creating cuBLASLt");
}

CublasLt::~CublasLt() = default;

bool CublasLt::found() const { return library_->lt != nullptr; }

void CublasLt::multiply(const LinearArguments& a, cudaStream_t stream) {
  const Library& lt = *library_;
  const auto set =
      lt.find<decltype(cublasLtMatmulDescSetAttribute)>("cublasLtMatmulDescSetAttribute");
  const auto layout = [&](uint64_t rows, uint64_t columns, int64_t stride) {
    cublasLtMatrixLayout_t made = nullptr;
    check_lt(lt.find<decltype(cublasLtMatrixLayoutCreate)>("cublasLtMatrixLayoutCreate")(
                 &made, CUDA_R_16BF, rows, columns, stride),
             "describing a matrix");
    return made;
  };
  cublasLtMatmulDesc_t product = nullptr;
  check_lt(lt.find<decltype(cublasLtMatmulDescCreate)>("cublasLtMatmulDescCreate")(
               &product, CUBLAS_COMPUTE_32F, CUDA_R_32F),
           "describing a product");
  // In the library's order by columns: out^T [n, rows] = W^T^T x^T.
  const cublasOperation_t transposed = CUBLAS_OP_T;
  check_lt(set(product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)),
           "transposing");
  const auto n = static_cast<uint64_t>(a.n), k = static_cast<uint64_t>(a.k),
             rows = static_cast<uint64_t>(a.rows);
  const auto weight = layout(k, n, a.k), x = layout(k, rows, a.x_row_stride),
             out = layout(n, rows, a.out_row_stride);
  cublasLtMatmulPreference_t preference = nullptr;
  check_lt(lt.find<decltype(cublasLtMatmulPreferenceCreate)>("cublasLtMatmulPreferenceCreate")(
               &preference),
           "creating a preference");
  const uint64_t workspace = kWorkspaceBytes;
  check_lt(lt.find<decltype(cublasLtMatmulPreferenceSetAttribute)>(
               "cublasLtMatmulPreferenceSetAttribute")(
               preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace)),
           "limiting the workspace");
  cublasLtMatmulHeuristicResult_t proposal;
  int found = 0;
  check_lt(lt.find<decltype(cublasLtMatmulAlgoGetHeuristic)>("cublasLtMatmulAlgoGetHeuristic")(
               lt.lt, product, weight, x, out, out, preference, 1, &proposal, &found),
           "asking for an algorithm");
  const float one = 1, zero = 0;
  check_lt(lt.find<decltype(cublasLtMatmul)>("cublasLtMatmul")(
               lt.lt, product, &one, a.weight, weight, a.x, x, &zero, a.out, out, a.out, out,
               &proposal.algo, lt.workspace.data(), kWorkspaceBytes, stream),
           "multiplying");
}

}  // namespace fathom::cuda
