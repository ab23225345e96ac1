// `fathom quantize`: converts a checkpoint in bf16, f16 or f32 to FP8 or to four bits, shard by
// shard.
//
// Uses a few pieces of 16 MiB per thread, whatever the model's size. A run that was interrupted, by
// a signal or a full disk, can be resumed: a shard is written under another name, synced and
// renamed, and the next run keeps the complete ones. config.json is written last, so that an
// incomplete model cannot be loaded.
//
// Until the run has ended, .fathom-quantize beside the shards records its options and the names,
// sizes and times of the source's files. A run with a different record is refused, and so is a
// second concurrent run.
#pragma once

#include <string>

#include "checkpoint/checkpoint.h"
#include "checkpoint/quantize_format.h"

namespace fathom {

struct QuantizeOptions {
  std::string output;  // a directory: new, empty, or of an interrupted run
  QuantizeFormat format;
  int64_t max_shard_bytes = 0;  // 0: mirror the source's shards
  int num_threads = 0;          // 0: one per core
  bool show_progress = true;    // a progress bar on stderr
  // Bytes of a tensor that a thread processes at once (at least 128 rows of a matrix): large enough
  // for the disk, small enough for many threads. Tests set it so that small tensors need many
  // pieces.
  int64_t piece_bytes = 16 << 20;
};

struct QuantizeSummary {
  int64_t quantized = 0;  // tensors
  int64_t tensors = 0;    // in the source
  int64_t source_bytes = 0;
  int64_t bytes = 0;  // bytes of the new shards
  int64_t shards = 0;
  int64_t kept = 0;  // shards kept from an earlier run
};

// Errors name the file, the tensor and the numbers. Finished shards stay for the next run.
Result<QuantizeSummary> quantize_checkpoint(const Checkpoint& checkpoint,
                                            const QuantizeOptions& options);

}  // namespace fathom
