// `fathom quantize`: a checkpoint in bf16, f16 or f32 to one in FP8, shard by shard.
//
// Memory is a few pieces of 16 MiB a thread, whatever the model's size. A run that was interrupted,
// by a signal or a full disk, is taken up where it was: a shard is written under another name,
// given to the disk and renamed, and the next run keeps those that are there whole. config.json
// comes last, so that nobody loads half a model.
//
// What a run was begun with (options; names, sizes and times of the source's files) is in
// .fathom-quantize beside the shards until it has ended. A run with others is refused. So is a
// second one at the same time.
#pragma once

#include <string>

#include "checkpoint/checkpoint.h"
#include "tensor/scale_form.h"

namespace fathom {

struct QuantizeOptions {
  std::string output;  // a directory: new, empty, or of an interrupted run
  ScaleForm scale_form = ScaleForm::kF32;
  int64_t max_shard_bytes = 0;  // 0: the source's shards, one to one
  int num_threads = 0;          // 0: one a core
  bool show_progress = true;    // a bar on stderr
  // Bytes of a tensor that a thread takes at once (of a matrix at least 128 rows): long enough for
  // the disk, short enough for many threads. Tests cut their small tensors into many pieces.
  int64_t piece_bytes = 16 << 20;
};

struct QuantizeSummary {
  int64_t quantized = 0;  // tensors
  int64_t tensors = 0;    // in the source, in all
  int64_t source_bytes = 0;
  int64_t bytes = 0;  // bytes of the new shards
  int64_t shards = 0;
  int64_t kept = 0;  // shards kept from an earlier run
};

// Errors name the file, the tensor and the numbers. Finished shards stay for the next run.
Result<QuantizeSummary> quantize_checkpoint(const Checkpoint& checkpoint,
                                            const QuantizeOptions& options);

}  // namespace fathom
