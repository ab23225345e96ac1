#include "checkpoint/quantize_record.h"

#include "checkpoint/output_directory.h"

namespace fathom {

Result<std::string> quantize_record(const Checkpoint& checkpoint, const QuantizeOptions& options) {
  std::string text =
      fmt::format("fathom quantize, form 2\nformat {}\nscale_fmt {}\nmax shard bytes {}\n",
                  name_of(options.format),
                  options.format.scale_form == ScaleForm::kPowerOfTwo ? "ue8m0" : "float",
                  options.max_shard_bytes);
  FATHOM_TRY(const std::string config, describe_file(checkpoint.directory() + "/config.json"));
  text += config;
  for (const std::string& path : checkpoint.files()) {
    FATHOM_TRY(const std::string line, describe_file(path));
    text += line;
  }
  return text;
}

}  // namespace fathom
