#include "ops/linear/cublas_lt_product_cuda.h"

#include <cublasLt.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <optional>

#include "device/cuda/error.h"
#include "ops/linear/library_plan.h"

namespace fathom::cuda {
namespace {

// The library functions that this file calls.
struct Functions {
  decltype(&cublasLtGetVersion) version;
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtMatmulDescCreate) create_product;
  decltype(&cublasLtMatmulDescDestroy) destroy_product;
  decltype(&cublasLtMatmulDescSetAttribute) set_product;
  decltype(&cublasLtMatrixLayoutCreate) create_layout;
  decltype(&cublasLtMatrixLayoutDestroy) destroy_layout;
  decltype(&cublasLtMatrixLayoutSetAttribute) set_layout;
  decltype(&cublasLtMatmulPreferenceCreate) create_preference;
  decltype(&cublasLtMatmulPreferenceDestroy) destroy_preference;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;
  decltype(&cublasLtMatmulAlgoGetHeuristic) propose;
  decltype(&cublasLtMatmul) multiply;
};

void* open_library() {
  if (const char* path = std::getenv("FATHOM_CUBLASLT")) return dlopen(path, RTLD_LAZY);
  constexpr const char* kPlaces[] = {"libcublasLt.so.13",
                                     "/usr/local/cuda/lib64/libcublasLt.so.13"};
  for (const char* place : kPlaces) {
    if (void* library = dlopen(place, RTLD_LAZY)) return library;
  }
  return nullptr;
}

std::optional<Functions> find_functions() {
  void* const library = open_library();
  if (library == nullptr) return std::nullopt;
  bool all = true;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    all = all && function != nullptr;
  };
  Functions functions;
  find(functions.version, "cublasLtGetVersion");
  find(functions.create, "cublasLtCreate");
  find(functions.destroy, "cublasLtDestroy");
  find(functions.create_product, "cublasLtMatmulDescCreate");
  find(functions.destroy_product, "cublasLtMatmulDescDestroy");
  find(functions.set_product, "cublasLtMatmulDescSetAttribute");
  find(functions.create_layout, "cublasLtMatrixLayoutCreate");
  find(functions.destroy_layout, "cublasLtMatrixLayoutDestroy");
  find(functions.set_layout, "cublasLtMatrixLayoutSetAttribute");
  find(functions.create_preference, "cublasLtMatmulPreferenceCreate");
  find(functions.destroy_preference, "cublasLtMatmulPreferenceDestroy");
  find(functions.set_preference, "cublasLtMatmulPreferenceSetAttribute");
  find(functions.propose, "cublasLtMatmulAlgoGetHeuristic");
  find(functions.multiply, "cublasLtMatmul");
  if (!all) return std::nullopt;
  return functions;
}

// Null without the library. The search runs once; the library stays loaded.
const Functions* library() {
  static const std::optional<Functions> functions = find_functions();
  return functions ? &*functions : nullptr;
}

void check_lt(cublasStatus_t status, const char* what) {
  check(status == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorUnknown, what);
}

// Descriptors that the library allocates.
template <typename Handle, auto kDestroy>
struct Destroyer {
  using pointer = Handle;
  void operator()(Handle handle) const { (library()->*kDestroy)(handle); }
};
template <typename Handle, auto kDestroy>
using Owned = std::unique_ptr<Handle, Destroyer<Handle, kDestroy>>;
using ProductDescription = Owned<cublasLtMatmulDesc_t, &Functions::destroy_product>;
using MatrixLayout = Owned<cublasLtMatrixLayout_t, &Functions::destroy_layout>;
using Preference = Owned<cublasLtMatmulPreference_t, &Functions::destroy_preference>;

struct Matrices {
  cudaDataType_t type;
  int64_t rows, columns, stride, batches, batch_stride;  // column-major, as the library stores them
};

MatrixLayout layout_of(const Matrices& matrices) {
  cublasLtMatrixLayout_t made = nullptr;
  check_lt(library()->create_layout(&made, matrices.type, static_cast<uint64_t>(matrices.rows),
                                    static_cast<uint64_t>(matrices.columns), matrices.stride),
           "describing a matrix");
  MatrixLayout layout(made);
  if (matrices.batches > 1) {
    const auto batches = static_cast<int32_t>(matrices.batches);
    const auto set = [&](cublasLtMatrixLayoutAttribute_t attribute, const auto& value) {
      check_lt(library()->set_layout(made, attribute, &value, sizeof(value)),
               "describing a batch of matrices");
    };
    set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, batches);
    set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, matrices.batch_stride);
  }
  return layout;
}

Preference make_preference() {
  cublasLtMatmulPreference_t made = nullptr;
  check_lt(library()->create_preference(&made), "creating a preference");
  Preference preference(made);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check_lt(library()->set_preference(made, attribute, &value, sizeof(value)),
             "setting a preference");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{CublasLt::kWorkspaceBytes});
  // Split-K slices are added in fp32 and in a fixed order.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    set(attribute, uint32_t{16});
  }
  return preference;
}

}  // namespace

std::string cublas_lt_version() {
  if (library() == nullptr) return "";
  const size_t version = library()->version();
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

struct CublasLt::Product {
  ProductDescription description;
  MatrixLayout weight, x, out;
  cublasLtMatmulAlgo_t algorithm;

  void set_rows(int32_t rows) const {
    const auto columns = static_cast<uint64_t>(rows);
    for (const auto layout : {x.get(), out.get()}) {
      check_lt(
          library()->set_layout(layout, CUBLASLT_MATRIX_LAYOUT_COLS, &columns, sizeof(columns)),
          "describing a number of rows");
    }
  }
};

CublasLt::CublasLt(void* handle, void* workspace) : handle_(handle), workspace_(workspace) {}

CublasLt::~CublasLt() { library()->destroy(static_cast<cublasLtHandle_t>(handle_)); }

std::unique_ptr<CublasLt> CublasLt::load(void* workspace) {
  if (library() == nullptr) return nullptr;
  cublasLtHandle_t handle = nullptr;
  check_lt(library()->create(&handle), "creating cuBLASLt");
  return std::unique_ptr<CublasLt>(new CublasLt(handle, workspace));
}

// Column-major, in the library's order: out^T [n, rows] = W^T^T x^T. Null if it has no algorithm.
std::unique_ptr<CublasLt::Product> CublasLt::choose(const LinearArguments& a, int32_t rows) const {
  auto product = std::make_unique<Product>();
  cublasLtMatmulDesc_t description = nullptr;
  check_lt(library()->create_product(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F),
           "describing a product");
  product->description.reset(description);
  const cublasOperation_t transposed = CUBLAS_OP_T;
  check_lt(library()->set_product(description, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                  sizeof(transposed)),
           "transposing");
  product->weight = layout_of({CUDA_R_16BF, a.k, a.n, a.k, a.batches, int64_t{a.n} * a.k});
  product->x = layout_of({CUDA_R_16BF, a.k, rows, a.x_row_stride, a.batches, a.x_batch_stride});
  product->out = layout_of({a.out_type == DType::kF32 ? CUDA_R_32F : CUDA_R_16BF, a.n, rows,
                            a.out_row_stride, a.batches, a.out_batch_stride});
  const Preference preference = make_preference();
  cublasLtMatmulHeuristicResult_t proposal;
  int found = 0;
  const cublasStatus_t status = library()->propose(
      static_cast<cublasLtHandle_t>(handle_), description, product->weight.get(), product->x.get(),
      product->out.get(), product->out.get(), preference.get(), 1, &proposal, &found);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || found == 0) return nullptr;
  check_lt(status, "asking cuBLASLt for an algorithm");
  product->algorithm = proposal.algo;
  return product;
}

bool CublasLt::multiply(const LinearArguments& a, cudaStream_t stream) {
  const auto alike = static_cast<int32_t>(rows_alike(a.rows));
  const auto [place, is_new] =
      products_.try_emplace({alike, a.n, a.k, a.batches, a.x_row_stride, a.x_batch_stride,
                             a.out_row_stride, a.out_batch_stride, a.out_type});
  if (is_new) place->second = choose(a, alike);
  const Product* const product = place->second.get();
  if (product == nullptr) return false;
  product->set_rows(a.rows);
  const float one = 1, zero = 0;
  check_lt(library()->multiply(static_cast<cublasLtHandle_t>(handle_), product->description.get(),
                               &one, a.weight, product->weight.get(), a.x, product->x.get(), &zero,
                               a.out, product->out.get(), a.out, product->out.get(),
                               &product->algorithm, workspace_, kWorkspaceBytes, stream),
           "multiplying by cuBLASLt");
  return true;
}

}  // namespace fathom::cuda
