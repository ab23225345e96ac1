// Files of pages: whose they are, when they go, and what is not taken for one.
#include "cache/page_store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace fathom {
namespace {

namespace fs = std::filesystem;

// Transfer for a cache of one page of 8 bytes.
class OnePage : public PageTransfer {
 public:
  int64_t page_bytes() const override { return sizeof number; }
  void save(int32_t, std::byte* host, int32_t id) override {
    std::memcpy(host, &number, sizeof number);
    ended_.push_back({id, true});
  }
  void load(const std::byte* host, int32_t, int32_t id) override {
    std::memcpy(&number, host, sizeof number);
    ended_.push_back({id, true});
  }
  void take_ended(std::vector<EndedCopy>& ended, bool) override {
    ended.clear();
    std::swap(ended, ended_);
  }
  uint64_t number = 4711;

 private:
  std::vector<EndedCopy> ended_;
};

class PageStoreFiles : public testing::Test {
 protected:
  void SetUp() override {
    parent_ = fs::path(testing::TempDir()) / fmt::format("page_store_{}", getpid());
    fs::create_directory(parent_);
  }
  void TearDown() override { fs::remove_all(parent_); }

  std::unique_ptr<PageStore> make_store() {
    auto store = PageStore::create({.directory = parent_.string(), .disk_bytes = 80}, pages_);
    EXPECT_TRUE(store) << store.error().message;
    return std::move(*store);
  }
  // The page, through a staging slot, into a file.
  bool write(PageStore& store, int32_t disk_slot, const PageKey& key) {
    const int32_t slot = store.staging().take();
    store.save(0, slot);
    store.take_ended(true);
    const bool written = store.write(slot, disk_slot, key);
    store.staging().give_back(slot);
    return written;
  }
  bool read(PageStore& store, int32_t disk_slot, const PageKey& key) {
    const int32_t slot = store.staging().take();
    const bool is_read = store.read(disk_slot, key, slot);
    store.staging().give_back(slot);
    return is_read;
  }
  std::string file_of(const PageStore& store, int32_t disk_slot) {
    return fmt::format("{}/{}.page", store.directory(), disk_slot);
  }
  int64_t num_entries() const {
    return std::distance(fs::directory_iterator(parent_), fs::directory_iterator());
  }

  OnePage pages_;
  fs::path parent_;
};

constexpr PageKey kKey{1, 2};

TEST_F(PageStoreFiles, AreOfThisProcessAndGoWithIt) {
  std::string directory;
  {
    const auto one = make_store(), two = make_store();
    directory = one->directory();
    EXPECT_NE(directory, two->directory());
    EXPECT_TRUE(fs::exists(directory)) << "the second does not take it for a dead one's";
    EXPECT_TRUE(write(*one, 3, kKey));
    EXPECT_TRUE(read(*one, 3, kKey));
    EXPECT_FALSE(read(*one, 3, PageKey{1, 3})) << "another page's key";
    fs::copy_file(file_of(*one, 3), file_of(*one, 4));
    EXPECT_FALSE(read(*one, 5, kKey));
  }
  EXPECT_EQ(num_entries(), 0);
  EXPECT_EQ(PageStore::create({.directory = "/no/such", .disk_bytes = 80}, pages_).error().message,
            "kv_offload_dir /no/such: No such file or directory");
  EXPECT_EQ(PageStore::create({.host_bytes = 7}, pages_).error().message,
            "kv_offload_bytes is 7, less than one page of 8 bytes");
}

// Each store has its part of what is asked for; a refusal names all of it.
TEST_F(PageStoreFiles, StoresShareTheBytes) {
  const auto create = [&](int64_t host, int64_t disk, const std::string& directory) {
    return PageStore::create(
        {.host_bytes = host, .directory = directory, .disk_bytes = disk, .num_stores = 3}, pages_);
  };
  const auto refusal = [&](int64_t host, int64_t disk, const std::string& directory) {
    const auto store = create(host, disk, directory);
    return store ? "none" : store.error().message;
  };
  const auto store = create(50, 72, parent_);
  ASSERT_TRUE(store) << store.error().message;
  EXPECT_EQ((*store)->host().total(), 2);
  EXPECT_EQ((*store)->disk().total(), 3);
  EXPECT_EQ(refusal(23, 0, ""),
            "kv_offload_bytes is 23, less than one page of 8 bytes in each of 3 lanes");
  EXPECT_EQ(refusal(24, 23, parent_),
            "kv_offload_disk_bytes is 23, less than one page of 8 bytes in each of 3 lanes");
}

// Inverts one byte of a file.
void damage(const std::string& path, std::streamoff at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const int byte = file.get();
  ASSERT_NE(byte, std::char_traits<char>::eof()) << path << " ends before byte " << at;
  file.seekp(at);
  file.put(static_cast<char>(~byte));
}

// 16 bytes of checksum before the page's 8. Damage to the page changes both halves of the checksum:
// only damage to the stored halves shows that each is compared.
TEST_F(PageStoreFiles, EachByteCounts) {
  const auto store = make_store();
  for (int at = 0; at < 24; ++at) {
    ASSERT_TRUE(write(*store, 3, kKey));
    ASSERT_TRUE(read(*store, 3, kKey));
    damage(file_of(*store, 3), at);
    EXPECT_FALSE(read(*store, 3, kKey)) << "byte " << at;
  }
}

// A process that makes a store with a file in it and is killed.
TEST_F(PageStoreFiles, OfAKilledProcessAreSweptByTheNext) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto store = PageStore::create({.directory = parent_.string(), .disk_bytes = 80}, pages_);
    const bool ok = store && write(**store, 3, kKey);
    if (::write(ready[1], ok ? "y" : "n", 1) != 1) _exit(1);
    for (;;) pause();
  }
  close(ready[1]);
  char answer = 'n';
  EXPECT_EQ(::read(ready[0], &answer, 1), 1);
  EXPECT_EQ(answer, 'y');
  close(ready[0]);
  EXPECT_EQ(num_entries(), 1);
  {
    const auto store = make_store();
    EXPECT_EQ(num_entries(), 2) << "it lives";
  }
  EXPECT_EQ(num_entries(), 1);
  kill(child, SIGKILL);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  const auto store = make_store();
  EXPECT_EQ(num_entries(), 1);
  EXPECT_TRUE(fs::exists(store->directory()));
}

TEST_F(PageStoreFiles, OfOthersStay) {
  const fs::path outside = parent_ / "outside";
  fs::create_directory(outside);
  std::ofstream(outside / "1.page") << "x";
  fs::create_directory_symlink(outside, parent_ / "fathom-pages-linked");
  fs::create_directory(parent_ / "fathom-pages-abcdef");
  std::ofstream(parent_ / "fathom-pages-abcdef" / "notes.txt") << "x";
  std::ofstream(parent_ / "fathom-pages-afile0") << "x";
  fs::create_directory(parent_ / "fathom-pages-of-somebody");
  const auto store = make_store();
  EXPECT_TRUE(fs::exists(outside / "1.page")) << "links are not followed";
  EXPECT_TRUE(fs::exists(parent_ / "fathom-pages-abcdef" / "notes.txt"));
  EXPECT_TRUE(fs::exists(parent_ / "fathom-pages-afile0"));
  EXPECT_TRUE(fs::exists(parent_ / "fathom-pages-of-somebody"));
}

TEST_F(PageStoreFiles, LinksAndFifosAreNone) {
  const auto store = make_store();
  const fs::path victim = parent_ / "victim";
  std::ofstream(victim) << "precious";
  fs::create_symlink(victim, file_of(*store, 1));
  EXPECT_FALSE(write(*store, 1, kKey));
  EXPECT_EQ(fs::file_size(victim), 8u);
  ASSERT_TRUE(write(*store, 2, kKey));
  fs::rename(file_of(*store, 2), parent_ / "moved");
  fs::create_symlink(parent_ / "moved", file_of(*store, 2));
  EXPECT_FALSE(read(*store, 2, kKey)) << "whole, but somewhere else";
  // Nobody has the other end: an ordinary open() would wait for ever. Then somebody has.
  ASSERT_EQ(mkfifo(file_of(*store, 3).c_str(), 0600), 0);
  EXPECT_FALSE(write(*store, 3, kKey));
  EXPECT_FALSE(read(*store, 3, kKey));
  const int other_end = open(file_of(*store, 3).c_str(), O_RDONLY | O_NONBLOCK);
  EXPECT_FALSE(write(*store, 3, kKey));
  EXPECT_FALSE(read(*store, 3, kKey));
  close(other_end);
}

TEST_F(PageStoreFiles, AreNotGivenToOtherPrograms) {
  const auto store = make_store();
  ASSERT_TRUE(write(*store, 1, kKey));
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (fs::read_symlink(entry.path(), gone).string() != store->directory()) continue;
    const int descriptor = std::stoi(entry.path().filename().string());
    EXPECT_TRUE(fcntl(descriptor, F_GETFD) & FD_CLOEXEC);
  }
}

}  // namespace
}  // namespace fathom
