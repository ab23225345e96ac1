// .fathom-quantize: the record that identifies an unfinished output directory.
#pragma once

#include <string>

#include "checkpoint/quantize_checkpoint.h"

namespace fathom {

// The record, one line per item: the options that affect the output, and the source's files with
// sizes and times.
Result<std::string> quantize_record(const Checkpoint& checkpoint, const QuantizeOptions& options);

// The output directory of one run, locked against a second run until it is destroyed.
class QuantizeOutput {
 public:
  // Creates the directory, or resumes that of an interrupted run with the same record. Other
  // content is refused by name.
  static Result<QuantizeOutput> open(const std::string& directory, const std::string& record);

  QuantizeOutput(QuantizeOutput&& other) noexcept;
  QuantizeOutput(const QuantizeOutput&) = delete;
  QuantizeOutput& operator=(const QuantizeOutput&) = delete;
  ~QuantizeOutput();

  std::string path(const std::string& name) const { return directory_ + "/" + name; }

  // Removes the record: the run has ended.
  Result<> finish();

 private:
  QuantizeOutput(std::string directory, int lock) : directory_(std::move(directory)), lock_(lock) {}

  std::string directory_;
  int lock_ = -1;  // descriptor of the directory, which holds the lock
};

}  // namespace fathom
