// scaled_linear() beside every form of DeepGEMM's kernel that was built, in one program and in
// turns: long GEMMs are bound by power, and one day's GPU is not another's.
//
//   deepgemm_linear_bench [--rows 512,1024] [--rounds 9] [--forms]      --forms: each form's time
//
// Graphs of launches over different operands (400 MB and more), all kernels of a shape in a new
// random order each round, medians. A form whose results differ from scaled_linear()'s is named and
// left out. JSON: {"device": …, "results": [{"rows", "n", "k", "us", "deepgemm_us", "form", …}]}.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "base/math.h"
#include "deepgemm_form.h"
#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/random_data.h"
#include "ops/scaled_linear/scaled_linear_cuda.h"
#include "tensor/dtype.h"

namespace fathom::peers {

std::vector<DeepGemmForm>& deepgemm_forms() {
  static std::vector<DeepGemmForm> forms;
  return forms;
}

namespace {

using cuda::DeviceArray;

// Operands of a shape, `copies` times.
class Problem {
 public:
  Problem(int64_t m, int64_t n, int64_t k)
      : m_(m),
        n_(n),
        k_(k),
        copies_(std::clamp<int64_t>((int64_t{400} << 20) / (n * k + m * k), 3, 24)),
        scale_rows_(round_up(m, 4)),
        x_(copies_ * m * k),
        weight_(copies_ * n * k),
        x_scales_(copies_ * x_scale_count()),
        weight_scales_(copies_ * weight_scale_count()),
        out_(copies_ * m * n) {
    std::mt19937 random(1);
    std::vector<uint8_t> values(size_t{1} << 22);
    const std::vector<float> wide = cuda::random_f32(std::ssize(values), 60, random);
    for (size_t i = 0; i < values.size(); ++i) values[i] = to_e4m3(wide[i]).bits;
    std::vector<float> scales(size_t{1} << 18);
    std::uniform_real_distribution<float> exponent(-9, -4);
    for (float& scale : scales) scale = std::exp2(exponent(random));
    fill(x_, values);
    fill(weight_, values);
    fill(x_scales_, scales);
    fill(weight_scales_, scales);
  }

  int64_t copies() const { return copies_; }

  void ours(int64_t copy, cudaStream_t stream) const {
    cuda::scaled_linear({.x = x_.data() + copy * m_ * k_,
                         .x_row_stride = k_,
                         .x_scales = x_scales_.data() + copy * x_scale_count(),
                         .x_scales_stride = scale_rows_,
                         .weight = weight_.data() + copy * n_ * k_,
                         .weight_scales = weight_scales_.data() + copy * weight_scale_count(),
                         .out = out_.data() + copy * m_ * n_,
                         .out_row_stride = n_,
                         .out_type = DType::kBF16,
                         .rows = static_cast<int32_t>(m_),
                         .n = static_cast<int32_t>(n_),
                         .k = static_cast<int32_t>(k_)},
                        stream);
  }
  void theirs(const DeepGemmForm& form, int64_t copy, cudaStream_t stream) const {
    form.launch({.x = x_.data() + copy * m_ * k_,
                 .x_scales = x_scales_.data() + copy * x_scale_count(),
                 .weight = weight_.data() + copy * n_ * k_,
                 .weight_scales = weight_scales_.data() + copy * weight_scale_count(),
                 .out = out_.data() + copy * m_ * n_,
                 .m = static_cast<int32_t>(m_)},
                stream);
  }
  // What launch(copy, stream) makes of the first operands.
  template <typename Launch>
  std::vector<float> result(const Launch& launch) const {
    const auto count = static_cast<size_t>(m_ * n_);
    cuda::check(cudaMemset(out_.data(), 0xFF, count * 2), "poison");
    launch(0, nullptr);
    cuda::check(cudaDeviceSynchronize(), "a product");
    std::vector<uint16_t> bits(count);
    cuda::check(cudaMemcpy(bits.data(), out_.data(), count * 2, cudaMemcpyDeviceToHost), "copy");
    return cuda::widen(bits);
  }

 private:
  int64_t x_scale_count() const { return scale_rows_ * k_ / 128; }
  // Weight scales of one copy, padded to 16 bytes.
  int64_t weight_scale_count() const { return round_up(ceil_div(n_, 128) * k_ / 128, 4); }

  template <typename T>
  static void fill(const DeviceArray<T>& array, const std::vector<T>& some) {
    for (int64_t at = 0; at < array.size(); at += std::ssize(some)) {
      const int64_t count = std::min(std::ssize(some), array.size() - at);
      cuda::check(cudaMemcpy(array.data() + at, some.data(), static_cast<size_t>(count) * sizeof(T),
                             cudaMemcpyHostToDevice),
                  "filling memory");
    }
  }

  const int64_t m_, n_, k_, copies_, scale_rows_;
  const DeviceArray<uint8_t> x_, weight_;
  const DeviceArray<float> x_scales_, weight_scales_;
  const DeviceArray<uint16_t> out_;
};

// The error over all values, as a share of the expected ones' norm.
double difference(const std::vector<float>& actual, const std::vector<float>& expected) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double off = double{actual[i]} - expected[i];
    error += off * off;
    norm += double{expected[i]} * expected[i];
  }
  return std::sqrt(error / norm);
}

std::string name_of(const DeepGemmForm& form) {
  const char* const shared = form.shared == Shared::kX        ? " x shared"
                             : form.shared == Shared::kWeight ? " W shared"
                                                              : "";
  return std::to_string(form.block_m) + "x" + std::to_string(form.block_n) + shared;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Options {
  std::vector<int64_t> rows = {512, 1024};
  int rounds = 9;
  bool forms = false;
};

void compare(int64_t m, int64_t n, int64_t k, const Options& options, const char*& separator) {
  const Problem problem(m, n, k);
  const auto ours = [&](int64_t copy, cudaStream_t stream) { problem.ours(copy, stream); };
  const std::vector<float> expected = problem.result(ours);
  std::vector<DeepGemmForm> forms;
  for (const DeepGemmForm& form : deepgemm_forms()) {
    if (form.n != n || form.k != k) continue;
    const double off = difference(problem.result([&](int64_t copy, cudaStream_t stream) {
      problem.theirs(form, copy, stream);
    }),
                                  expected);
    if (off < 5e-3) {  // both round to bf16
      forms.push_back(form);
    } else {
      std::fprintf(stderr, "%ld rows of [%ld, %ld], %s: %.4f off, left out\n", m, n, k,
                   name_of(form).c_str(), off);
    }
  }
  if (forms.empty()) return;
  // The last is ours.
  std::vector<std::vector<double>> times(forms.size() + 1);
  std::vector<size_t> order(times.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::mt19937 random(2);
  for (int round = 0; round < options.rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t i : order) {
      times[i].push_back(cuda::time_in_graph(
          static_cast<int>(problem.copies()), [&](int copy, cudaStream_t stream) {
            i < forms.size() ? problem.theirs(forms[i], copy, stream) : ours(copy, stream);
          }));
    }
  }
  std::vector<double> medians;
  for (const auto& of_one : times) medians.push_back(median(of_one));
  const auto best =
      static_cast<size_t>(std::min_element(medians.begin(), medians.end() - 1) - medians.begin());
  std::printf(
      "%s\n  {\"rows\": %ld, \"n\": %ld, \"k\": %ld, \"us\": %.2f, \"deepgemm_us\": %.2f, "
      "\"form\": \"%s\", \"forms_measured\": %zu",
      separator, m, n, k, medians.back(), medians[best], name_of(forms[best]).c_str(),
      forms.size());
  separator = ",";
  if (options.forms) {
    std::printf(", \"forms\": {");
    for (size_t i = 0; i < forms.size(); ++i) {
      std::printf("%s\"%s\": %.2f", i == 0 ? "" : ", ", name_of(forms[i]).c_str(), medians[i]);
    }
    std::printf("}");
  }
  std::printf("}");
  std::fflush(stdout);
}

int run(const Options& options) {
  std::map<std::pair<int, int>, int> shapes;
  for (const DeepGemmForm& form : deepgemm_forms()) ++shapes[{form.n, form.k}];
  std::printf("{\"device\": \"%s\", \"results\": [", cuda::device_line().c_str());
  const char* separator = "";
  for (const auto& [shape, count] : shapes) {
    for (const int64_t rows : options.rows) {
      compare(rows, shape.first, shape.second, options, separator);
    }
  }
  std::printf("\n]}\n");
  return 0;
}

}  // namespace
}  // namespace fathom::peers

int main(int argc, char** argv) {
  fathom::peers::Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--forms") {
      options.forms = true;
    } else if (flag == "--rounds" && i + 1 < argc) {
      options.rounds = std::max(1, std::atoi(argv[++i]));
    } else if (flag == "--rows" && i + 1 < argc) {
      options.rows.clear();
      std::stringstream list(argv[++i]);
      for (std::string item; std::getline(list, item, ',');) {
        options.rows.push_back(std::max(1, std::atoi(item.c_str())));
      }
    } else {
      std::fprintf(stderr, "usage: %s [--rows 512,1024] [--rounds 9] [--forms]\n", argv[0]);
      return 2;
    }
  }
  return fathom::peers::run(options);
}
