// The bundled model in the form of DeepSeek-Coder-V2-Instruct-FP8 (a scale a matrix, a scale for
// the activations it takes) on the GPU, against the same checkpoint in float32 on the CPU, which
// quantises no activations. Run from the repository's root.
#include <gtest/gtest.h>

#include "checkpoint/test_files.h"
#include "e2e/gpu_deviation.h"
#include "e2e/gpu_fixture.h"
#include "e2e/static_activations.h"

namespace fathom {
namespace {

// Bounds are by measurement: 16.8 to 17.9 % and 0.26 to 0.27 with e4m3, 3.6 to 4.1 % and 0.051 to
// 0.055 with bf16. (The random text is another one than gpu_model_test.cc's.)
TEST(GpuStaticActivations, AreNearToFloat32) {
  const TestFolder folder;
  write_static_activations(bundled_checkpoint(), folder.path());
  const auto checkpoint = Checkpoint::open(folder.path());
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
  ASSERT_TRUE(checkpoint->config().quantization.static_activations);
  std::mt19937 random(1);
  const auto texts = random_texts(random);
  const auto right = run(*on_cpu(*checkpoint, DType::kF32, CacheFormat::kF32), texts);
  deviation(run(*on_cpu(bundled_checkpoint(), DType::kF32, CacheFormat::kF32), texts), right,
            "CPU, float32, weights by blocks");
  for (const StoredFp8 stored_fp8 : {StoredFp8::kExpandedToBF16, StoredFp8::kKept}) {
    const bool e4m3 = stored_fp8 == StoredFp8::kKept;
    for (const AttentionForm form :
         {AttentionForm::kAuto, AttentionForm::kAbsorbed, AttentionForm::kMha}) {
      GpuRunnerOptions options = gpu_options();
      options.stored_fp8 = stored_fp8;
      options.attention = form;
      const Deviation its = deviation(run(*on_gpu(options, *checkpoint), texts), right,
                                      e4m3 ? "GPU, e4m3" : "GPU, bf16");
      EXPECT_LE(its.logprobs, e4m3 ? 0.32 : 0.07);
      EXPECT_LE(its.other_tokens, e4m3 ? 0.22 : 0.05);
    }
  }
}

}  // namespace
}  // namespace fathom
