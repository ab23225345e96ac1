// The directory that a checkpoint is written into: by `fathom quantize`, and by `convert`.
//
// A record in it, .fathom-COMMAND, identifies an unfinished run: the options that affect the
// output, and the source's files. The same command with the same record resumes the run.
#pragma once

#include <string>

#include "checkpoint/checkpoint.h"

namespace fathom {

// The output directory of one run, locked against a second run until it is destroyed.
class OutputDirectory {
 public:
  // Creates the directory, or resumes that of an interrupted run of the command with the same
  // record. Other content is refused by name.
  static Result<OutputDirectory> open(const std::string& directory, const std::string& command,
                                      const std::string& record);

  OutputDirectory(OutputDirectory&& other) noexcept;
  OutputDirectory(const OutputDirectory&) = delete;
  OutputDirectory& operator=(const OutputDirectory&) = delete;
  ~OutputDirectory();

  std::string path(const std::string& name) const { return directory_ + "/" + name; }

  // Removes the record: the run has ended.
  Result<> finish();

 private:
  OutputDirectory(std::string directory, std::string record, int lock)
      : directory_(std::move(directory)), record_(std::move(record)), lock_(lock) {}

  std::string directory_;
  std::string record_;  // the record's file name
  int lock_ = -1;       // descriptor of the directory, which holds the lock
};

// A line of a record: a file's name, size and time.
Result<std::string> describe_file(const std::string& path);

// Copies the other files of a model's directory: tokenizer, generation defaults, licence.
Result<> copy_small_files(const Checkpoint& checkpoint, const OutputDirectory& output);

}  // namespace fathom
