// .fathom-quantize: what an unfinished output directory was begun with.
#pragma once

#include <string>

#include "checkpoint/quantize_checkpoint.h"

namespace fathom {

// One line a fact: the options that change bytes, the source's files with size and time.
Result<std::string> quantize_record(const Checkpoint& checkpoint, const QuantizeOptions& options);

// The output directory of one run, locked against a second one until it is destroyed.
class QuantizeOutput {
 public:
  // Makes the directory, or takes up that of an interrupted run with the same record. Any other
  // content is refused by name.
  static Result<QuantizeOutput> open(const std::string& directory, const std::string& record);

  QuantizeOutput(QuantizeOutput&& other) noexcept;
  QuantizeOutput(const QuantizeOutput&) = delete;
  QuantizeOutput& operator=(const QuantizeOutput&) = delete;
  ~QuantizeOutput();

  std::string path(const std::string& name) const { return directory_ + "/" + name; }

  // The run has ended: takes the record away.
  Result<> finish();

 private:
  QuantizeOutput(std::string directory, int lock) : directory_(std::move(directory)), lock_(lock) {}

  std::string directory_;
  int lock_ = -1;  // a descriptor of the directory
};

}  // namespace fathom
