// Lays a model's weights out in one allocation of device memory, and fills it from a checkpoint.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "model/weight_forms.h"
#include "model/weight_upload_cuda.h"
#include "model/weights_cuda.h"

namespace fathom::cuda {

// Collects the weights of one load, on the device that is current at construction. The target
// fields must not move until load() has returned.
class WeightCollector {
 public:
  WeightCollector(const Checkpoint& checkpoint, StoredFp8 stored_fp8, const LoadOptions& options);

  // A norm weight or bias.
  void vector(const std::string& name, int64_t size, float** field);
  // The embedding or the head, in bf16, padded with zeros to `padded_rows`.
  void table(const std::string& name, int64_t rows, int64_t cols, int64_t padded_rows,
             bf16** field);
  // Matrices stacked by rows.
  void matrix(const std::vector<MatrixPart>& parts, int64_t cols, WeightMatrix* field);
  // The router, in bf16 if it is stored so, otherwise in fp32, which takes three times the
  // instructions. Space is reserved for either.
  void router(const std::string& name, int64_t experts, int64_t hidden, LayerWeights* out);
  // kv_b_proj whole, and each head's two halves for absorbed attention.
  void kv_b(const std::string& name, const ModelConfig& config, LayerWeights* out);
  // `count` SwiGLU blocks, block i's tensors under prefix_of(i).
  void mlps(const WeightForms::PrefixOf& prefix_of, int64_t count, int64_t hidden, int64_t width,
            DType type, MlpWeights* out);

  const WeightForms& forms() const { return forms_; }
  int64_t bytes() const { return bytes_; }
  // Allocates, reads and places everything.
  Result<DeviceArray<std::byte>> load();

 private:
  using Place = std::function<Result<>(const WeightSource&, WeightUpload&)>;
  struct Request {
    std::string name;
    std::vector<int64_t> shape;
    Place place;
  };

  template <typename T>
  void place(T** field, int64_t count);
  void allocate(const WeightForm& form, int64_t rows, int64_t cols, WeightMatrix* field);
  void fill(const MatrixPart& part, int64_t cols, WeightMatrix* field, int64_t first, int64_t count,
            int64_t wide);
  void input_scale(const std::string& weight, WeightMatrix* field);

  Result<> read();
  Result<> make_up();
  Result<> on_this_thread(const Place& place, const WeightSource& source);

  const Checkpoint& checkpoint_;
  const LoadOptions options_;
  const WeightForms forms_;
  const int device_;
  int64_t bytes_ = 0;
  std::vector<std::function<void(std::byte*)>> fields_;
  std::vector<Request> requests_;
  std::mutex mutex_;  // guards idle_, and input scales
  std::vector<std::unique_ptr<WeightUpload>> idle_;
};

}  // namespace fathom::cuda
