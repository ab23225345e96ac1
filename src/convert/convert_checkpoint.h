// A checkpoint of grouped-query attention written as one of multi-head
// latent attention, layer by layer.
//
// A layer is read, converted and written as one shard; a few are worked on at once, each with its
// attention weights in double precision in memory. A run that was interrupted, by a signal or a
// full disk, can be resumed: complete shards are kept. config.json is written last, so that an
// incomplete model cannot be loaded.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "convert/matrix.h"
#include "convert/mla_shape.h"

namespace fathom::mla {

struct ConvertOptions {
  std::string output;         // a directory: new, empty, or of an interrupted run
  int num_threads = 0;        // layers at once; 0: one per core, at most 4
  bool show_progress = true;  // a progress bar on stderr
  // Identifies the moments in the record of an unfinished run: lines as describe_file() writes.
  std::string calibration;
};

struct LayerReport {
  double rope_energy = 0;    // share of the keys' energy that keeps its rotation
  double latent_energy = 0;  // share of the values' and unrotated keys' energy in the latent
};

struct ConvertSummary {
  std::vector<LayerReport> layers;
  int64_t source_bytes = 0, bytes = 0;  // of weights
  int64_t kept = 0;                     // layers from an earlier run
};

// `moments`: a layer's second moments (calibration.h); empty: those that follow from the weights.
Result<ConvertSummary> convert_checkpoint(const Checkpoint& checkpoint, const MlaShape& shape,
                                          std::span<const Matrix> moments,
                                          const ConvertOptions& options);

// The source's config.json as that of the converted model.
Result<std::string> converted_config(std::string_view config, const ModelConfig& source,
                                     const MlaShape& shape, std::string_view name);

}  // namespace fathom::mla
