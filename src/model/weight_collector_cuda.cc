#include "model/weight_collector_cuda.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/math.h"
#include "checkpoint/stored_scales.h"
#include "tensor/scale_form.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kAlignment = 256;
// Default number of threads: they only read and copy, and 8 nearly saturate the page cache.
constexpr int kLoadingThreads = 8;

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "asking for the device");
  return device;
}

// `count` rows of a matrix from row `first` on, which begins a scale block if it has them.
WeightPlace place_of(const WeightMatrix& matrix, int64_t cols, int64_t first, int64_t count) {
  WeightPlace at{.type = matrix.type, .rows = count, .cols = cols};
  at.values = static_cast<std::byte*>(matrix.values) + first * cols * size_of(matrix.type);
  if (matrix.scales != nullptr) {
    at.scales = matrix.scales + first / kScaleBlock * (cols / kScaleBlock);
  }
  if (matrix.row_scales != nullptr) at.row_scales = matrix.row_scales + first;
  return at;
}

Result<float> read_number(const WeightSource& source) {
  std::array<std::byte, sizeof(float)> bytes;
  const DType type = source.matrix.values.dtype();
  FATHOM_RETURN_IF_ERROR(
      source.read(0, std::span(bytes).first(static_cast<size_t>(size_of(type)))));
  ScaledMatrix matrix;
  matrix.values = ConstTensorView(bytes.data(), type, {1, 1});
  return matrix.at(0, 0);
}

}  // namespace

WeightCollector::WeightCollector(const Checkpoint& checkpoint, StoredFp8 stored_fp8,
                                 const LoadOptions& options)
    : checkpoint_(checkpoint),
      options_(options),
      forms_(checkpoint, stored_fp8, options_),
      device_(current_device()) {}

// ---- The layout ----

// Reserves `count` values of T; *field is set once the memory is allocated.
template <typename T>
void WeightCollector::place(T** field, int64_t count) {
  fields_.push_back([field, offset = bytes_](std::byte* memory) {
    *field = reinterpret_cast<T*>(memory + offset);
  });
  bytes_ = round_up(bytes_ + count * static_cast<int64_t>(sizeof(T)), kAlignment);
}

void WeightCollector::allocate(const WeightForm& form, int64_t rows, int64_t cols,
                               WeightMatrix* field) {
  field->type = form.type;
  fields_.push_back(
      [field, offset = bytes_](std::byte* memory) { field->values = memory + offset; });
  bytes_ = round_up(bytes_ + rows * cols * size_of(form.type), kAlignment);
  if (form.type != DType::kF8E4M3) return;
  place(&field->scales, ceil_div(rows, kScaleBlock) * (cols / kScaleBlock));
  if (form.by_row) place(&field->row_scales, rows);
}

void WeightCollector::vector(const std::string& name, int64_t size, float** field) {
  place(field, size);
  requests_.push_back({name, {size}, [=](const WeightSource& source, WeightUpload& upload) {
                         return upload.copy(
                             source,
                             {.type = DType::kF32, .values = *field, .rows = 1, .cols = size});
                       }});
}

void WeightCollector::table(const std::string& name, int64_t rows, int64_t cols,
                            int64_t padded_rows, bf16** field) {
  place(field, padded_rows * cols);
  requests_.push_back({name, {rows, cols}, [=](const WeightSource& source, WeightUpload& upload) {
                         return upload.copy(source,
                                            {.values = *field, .rows = padded_rows, .cols = cols});
                       }});
}

void WeightCollector::matrix(const std::vector<MatrixPart>& parts, int64_t cols,
                             WeightMatrix* field) {
  int64_t rows = 0;
  for (const MatrixPart& part : parts) rows += part.rows;
  allocate(forms_.matrix(parts, cols), rows, cols, field);
  int64_t first = 0;
  for (const MatrixPart& part : parts) {
    fill(part, cols, field, first, part.rows, cols);
    first += part.rows;
  }
}

void WeightCollector::router(const std::string& name, int64_t experts, int64_t hidden,
                             LayerWeights* out) {
  place(&out->gate, experts * hidden * static_cast<int64_t>(sizeof(float)));
  requests_.push_back(
      {name, {experts, hidden}, [=](const WeightSource& source, WeightUpload& upload) {
         const ScaledMatrix& matrix = source.matrix;
         const bool narrow = matrix.values.dtype() == DType::kBF16 && matrix.scales.empty();
         out->gate_type = narrow ? DType::kBF16 : DType::kF32;
         return upload.copy(
             source,
             {.type = out->gate_type, .values = out->gate, .rows = experts, .cols = hidden});
       }});
}

void WeightCollector::kv_b(const std::string& name, const ModelConfig& config, LayerWeights* out) {
  const int64_t heads = config.num_heads, latent = config.kv_lora_rank;
  const int64_t nope = config.qk_nope_dim, v = config.v_dim;
  const int64_t rows = heads * (nope + v);
  matrix({{name, rows}}, latent, &out->kv_b);
  const WeightForm halves = forms_.kv_b_halves({name, rows}, latent, nope, v);
  allocate(halves, heads * latent, nope, &out->uk);
  allocate(halves, heads * v, latent, &out->uv);
  requests_.back().place = [=, whole = std::move(requests_.back().place)](
                               const WeightSource& source, WeightUpload& upload) -> Result<> {
    FATHOM_RETURN_IF_ERROR(whole(source, upload));
    upload.split({.kv_b = place_of(out->kv_b, latent, 0, rows),
                  .uk = place_of(out->uk, nope, 0, heads * latent),
                  .uv = place_of(out->uv, latent, 0, heads * v),
                  .heads = static_cast<int32_t>(heads),
                  .nope = static_cast<int32_t>(nope),
                  .v = static_cast<int32_t>(v),
                  .latent = static_cast<int32_t>(latent)});
    return {};
  };
}

void WeightCollector::mlps(const WeightForms::PrefixOf& prefix_of, int64_t count, int64_t hidden,
                           int64_t width, DType type, MlpWeights* out) {
  const int64_t wide = round_up(width, type == DType::kF8E4M3 ? kScaleBlock : kBf16WidthUnit);
  out->width = wide;
  allocate({type}, count * 2 * wide, hidden, &out->gate_up);
  allocate({type}, count * hidden, wide, &out->down);
  for (int64_t i = 0; i < count; ++i) {
    const std::string prefix = prefix_of(i);
    fill({prefix + "gate_proj.weight", width}, hidden, &out->gate_up, 2 * i * wide, wide, hidden);
    fill({prefix + "up_proj.weight", width}, hidden, &out->gate_up, (2 * i + 1) * wide, wide,
         hidden);
    fill({prefix + "down_proj.weight", hidden}, width, &out->down, i * hidden, hidden, wide);
  }
}

// The stored matrix `part` of `cols` columns fills [count, wide] of *field from row `first` on.
void WeightCollector::fill(const MatrixPart& part, int64_t cols, WeightMatrix* field, int64_t first,
                           int64_t count, int64_t wide) {
  if (field->type == DType::kF8E4M3) input_scale(part.name, field);
  requests_.push_back(
      {part.name, {part.rows, cols}, [=](const WeightSource& source, WeightUpload& upload) {
         return upload.copy(source, place_of(*field, wide, first, count));
       }});
}

// Loads X.input_scale beside X.weight, if the checkpoint's quantization is static and the tensor
// exists.
void WeightCollector::input_scale(const std::string& weight, WeightMatrix* field) {
  if (!checkpoint_.config().quantization.static_activations || checkpoint_.is_dummy()) return;
  const std::string name = weight.substr(0, weight.rfind('.')) + ".input_scale";
  if (checkpoint_.find(name) == nullptr) return;
  requests_.push_back({name, {1}, [=, this](const WeightSource& source, WeightUpload&) -> Result<> {
                         FATHOM_TRY(const float scale, read_number(source));
                         if (!std::isfinite(scale) || scale <= 0) {
                           return invalid("holds {}; a scale is a positive number", scale);
                         }
                         const std::scoped_lock lock(mutex_);
                         field->input_scale = std::max(field->input_scale, scale);
                         return {};
                       }});
}

// ---- Loading ----

Result<DeviceArray<std::byte>> WeightCollector::load() {
  DeviceArray<std::byte> memory(bytes_);
  for (const auto& set : fields_) set(memory.data());
  FATHOM_RETURN_IF_ERROR(checkpoint_.is_dummy() ? make_up() : read());
  return memory;
}

Result<> WeightCollector::read() {
  std::vector<TensorRequest> requests;
  for (const Request& request : requests_) {
    TensorRequest& wanted = requests.emplace_back();
    wanted.name = request.name;
    wanted.shape = request.shape;
    wanted.place_unread = [this, &request](const ScaledMatrix& matrix, const ReadValues& values) {
      return on_this_thread(request.place, {matrix, values, {}});
    };
  }
  FATHOM_RETURN_IF_ERROR(check_load_options(checkpoint_, options_));
  LoadOptions options = options_;
  options.quantize_fp8 = false;  // the device quantizes
  if (options.num_threads == 0) options.num_threads = kLoadingThreads;
  return load_tensors(checkpoint_, requests, options);
}

// Fills dummy weights on the device: the host's threads are ten times slower.
Result<> WeightCollector::make_up() {
  std::vector<float> scales;
  for (const Request& request : requests_) {
    const TensorEntry& entry = *checkpoint_.find(request.name);
    const int64_t rows = request.shape.size() == 2 ? request.shape[0] : 1;
    const int64_t cols = request.shape.back();
    WeightSource source;
    source.dummy = dummy_values(request.name, cols, options_.dummy_seed);
    source.matrix.values = ConstTensorView(nullptr, entry.dtype, {rows, cols});
    if (entry.dtype == DType::kF8E4M3) {
      FATHOM_TRY(const StoredScales stored,
                 find_scales(checkpoint_, request.name, entry, rows, cols));
      scales.resize(static_cast<size_t>(stored.grid_rows * stored.grid_cols));
      fill_dummy_scales(stored.name, cols,
                        checkpoint_.config().quantization.scales_are_powers_of_two,
                        options_.dummy_seed, scales);
      source.matrix.scales = ConstTensorView(scales.data(), {stored.grid_rows, stored.grid_cols});
      source.matrix.scale_rows = stored.scale_rows;
      source.matrix.scale_cols = stored.scale_cols;
    }
    FATHOM_RETURN_IF_ERROR(on_this_thread(request.place, source));
  }
  return {};
}

// A device error ends a loading thread like any other error.
Result<> WeightCollector::on_this_thread(const Place& place, const WeightSource& source) {
  try {
    std::unique_ptr<WeightUpload> upload;
    {
      const std::scoped_lock lock(mutex_);
      if (!idle_.empty()) {
        upload = std::move(idle_.back());
        idle_.pop_back();
      }
    }
    check(cudaSetDevice(device_), "choosing the device");
    if (!upload) upload = std::make_unique<WeightUpload>();
    FATHOM_RETURN_IF_ERROR(place(source, *upload));
    const std::scoped_lock lock(mutex_);
    idle_.push_back(std::move(upload));
    return {};
  } catch (const DeviceError& failure) {
    return error(Code::kInternal, "{}", failure.what());
  }
}

}  // namespace fathom::cuda
