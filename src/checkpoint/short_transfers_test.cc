// Short reads and writes: the kernel may transfer less than requested (at most 2 GiB per call; less
// after a signal or on a network file system). This program replaces pread and pwrite to imitate
// that.
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "checkpoint/file_reader.h"
#include "checkpoint/file_writer.h"
#include "checkpoint/test_files.h"

namespace {

std::atomic<size_t> most_bytes{std::numeric_limits<size_t>::max()};  // per call

// Limits the size of transfers while it lives.
struct ShortTransfers {
  explicit ShortTransfers(size_t bytes) { most_bytes = bytes; }
  ~ShortTransfers() { most_bytes = std::numeric_limits<size_t>::max(); }
};

}  // namespace

extern "C" ssize_t pread(int file, void* to, size_t bytes, off_t offset) {
  return syscall(SYS_pread64, file, to, std::min(bytes, most_bytes.load()), offset);
}

extern "C" ssize_t pwrite(int file, const void* from, size_t bytes, off_t offset) {
  return syscall(SYS_pwrite64, file, from, std::min(bytes, most_bytes.load()), offset);
}

namespace fathom {
namespace {

std::string counted_bytes(size_t count) {
  std::string bytes(count, '\0');
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<char>(i * 7 + i / 256);
  return bytes;
}

TEST(ShortTransfers, AReadGoesOnWhereTheLastOneEnded) {
  const TestFolder folder;
  const std::string stored = counted_bytes(1000);
  folder.write("file", stored);
  const auto file = FileReader::open(folder / "file");
  ASSERT_TRUE(file) << file.error().message;
  const ShortTransfers kernel(64);
  std::string read(900, '\0');
  ASSERT_TRUE(file->read(read.data(), 900, 100));
  EXPECT_EQ(read, stored.substr(100));
}

TEST(ShortTransfers, AWriteGoesOnWhereTheLastOneEnded) {
  const TestFolder folder;
  const std::string wanted = counted_bytes(1000);
  auto file = FileWriter::create(folder / "file", 1000);
  ASSERT_TRUE(file) << file.error().message;
  {
    const ShortTransfers kernel(64);
    ASSERT_TRUE(file->write(wanted.data() + 300, 700, 300));
    ASSERT_TRUE(file->write(wanted.data(), 300, 0));
  }
  ASSERT_TRUE(file->finish());
  EXPECT_EQ(file_text(folder / "file"), wanted);
}

}  // namespace
}  // namespace fathom
