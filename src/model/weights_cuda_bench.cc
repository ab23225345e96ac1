// Speed and memory of loading weights to the GPU, beside the rates of disk, page cache and PCI
// Express: a random (dummy) checkpoint of a model's shape is written, then loaded from the page
// cache and from the disk.
//
//   weights_cuda_bench [MODEL] [--layers N] [--folder FOLDER] [--threads N,N...] [--json]
//
// MODEL: config.json's folder, bench/models/v2-lite. The checkpoint is written to FOLDER and
// removed at the end.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/safetensors.h"
#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/pinned_array.h"
#include "model/weights_cuda.h"

namespace fathom::cuda {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kShardBytes = int64_t{2} << 30;
constexpr int64_t kPiece = 16 << 20;

double seconds_of(const auto& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

void require(bool succeeded, const char* what) {
  if (!succeeded) fail(fmt::format("{}: {}", what, std::strerror(errno)));
}

void in_threads(int count, const auto& body) {
  std::vector<std::jthread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
}

struct Shard {
  std::string path, header;  // header: including its length field
  int64_t bytes = 0;         // of tensors
};

// The checkpoint's tensors in the order of their names, as in published ones.
std::vector<Shard> plan_shards(const Checkpoint& shape, const std::string& folder) {
  std::vector<Shard> shards;
  std::string entries;
  const auto end_shard = [&] {
    if (entries.empty()) return;
    std::string header = "{" + entries + "}";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    const uint64_t length = header.size();
    shards.back().header.assign(reinterpret_cast<const char*>(&length), sizeof(length));
    shards.back().header += header;
    entries.clear();
  };
  std::string index;
  for (const auto& [name, entry] : shape.tensors()) {
    if (shards.empty() || shards.back().bytes > kShardBytes) {
      end_shard();
      shards.emplace_back().path = fmt::format("{}/model-{}.safetensors", folder, shards.size());
    }
    Shard& shard = shards.back();
    entries += fmt::format(R"({}"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                           entries.empty() ? "" : ",", name, published_name(entry.dtype),
                           fmt::join(entry.shape, ","), shard.bytes, shard.bytes + entry.bytes);
    index += fmt::format(R"({}"{}":"{}")", index.empty() ? "" : ",", name,
                         fs::path(shard.path).filename().string());
    shard.bytes += entry.bytes;
  }
  end_shard();
  std::ofstream(folder + "/model.safetensors.index.json") << "{\"weight_map\":{" << index << "}}";
  return shards;
}

// config.json with another number of layers.
void write_config(const std::string& model, int64_t layers, const std::string& folder) {
  std::ifstream in(model + "/config.json");
  std::ofstream out(folder + "/config.json");
  for (std::string line; std::getline(in, line);) {
    out << (line.find("\"num_hidden_layers\"") == std::string::npos
                ? line
                : fmt::format("  \"num_hidden_layers\": {},", layers))
        << "\n";
  }
}

void write_shard(const Shard& shard) {
  const int file = open(shard.path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
  require(file >= 0, "creating a shard");
  const auto write_all = [&](const char* data, int64_t bytes) {
    for (int64_t done = 0; done < bytes;) {
      const ssize_t wrote = write(file, data + done, static_cast<size_t>(bytes - done));
      require(wrote > 0, "writing a shard");
      done += wrote;
    }
  };
  write_all(shard.header.data(), std::ssize(shard.header));
  std::vector<uint16_t> values(kPiece / 2);
  std::mt19937 random(static_cast<uint32_t>(shard.bytes));
  for (uint16_t& value : values) value = (random() & 0x80FF) | 0x3C00;  // 0.008 to 0.03
  for (int64_t done = 0; done < shard.bytes; done += kPiece) {
    write_all(reinterpret_cast<const char*>(values.data()), std::min(kPiece, shard.bytes - done));
  }
  require(fsync(file) == 0, "writing to the disk");
  close(file);
}

void forget(const std::vector<Shard>& shards) {
  for (const Shard& shard : shards) {
    const int file = open(shard.path.c_str(), O_RDONLY);
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    close(file);
  }
}

// Seconds to read all shards in pieces, with so many threads, into pinned memory.
double read_seconds(const std::vector<Shard>& shards, int threads) {
  std::vector<std::pair<const Shard*, int64_t>> pieces;
  for (const Shard& shard : shards) {
    for (int64_t at = 0; at < shard.bytes; at += kPiece) pieces.emplace_back(&shard, at);
  }
  PinnedArray<std::byte> memory(threads * kPiece);
  std::atomic<size_t> next = 0;
  return seconds_of([&] {
    in_threads(threads, [&](int thread) {
      for (size_t i = next++; i < pieces.size(); i = next++) {
        const int file = open(pieces[i].first->path.c_str(), O_RDONLY);
        require(pread(file, memory.data() + thread * kPiece, kPiece, pieces[i].second) > 0,
                "reading");
        close(file);
      }
    });
  });
}

double copy_rate() {
  constexpr int64_t kBytes = int64_t{1} << 30;
  const PinnedArray<std::byte> from(kBytes);
  std::memset(from.data(), 1, kBytes);
  const DeviceArray<std::byte> to(kBytes);
  const auto copy = [&] {
    check(cudaMemcpy(to.data(), from.data(), kBytes, cudaMemcpyHostToDevice), "copying");
  };
  copy();
  return kBytes / seconds_of(copy) / 1e9;
}

// Peak memory in use during its lifetime, sampled a thousand times a second.
class MemoryWatch {
 public:
  MemoryWatch() : thread_([this](const std::stop_token& stop) { watch(stop); }) {}

  // Bytes since construction.
  struct Most {
    double device = 0, host = 0;
  };
  Most stop() {
    thread_.request_stop();
    thread_.join();
    return {static_cast<double>(device_ - device_before_),
            static_cast<double>(host_ - host_before_)};
  }

  static int64_t device_in_use() {
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "the device's memory");
    return static_cast<int64_t>(total - free);
  }

 private:
  // Host bytes of this process, pinned memory included.
  static int64_t host_in_use() {
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages >> pages;
    return pages * sysconf(_SC_PAGESIZE);
  }

  void watch(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      device_ = std::max(device_, device_in_use());
      host_ = std::max(host_, host_in_use());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  const int64_t device_before_ = device_in_use(), host_before_ = host_in_use();
  int64_t device_ = device_before_, host_ = host_before_;
  std::jthread thread_;  // last: it uses the others
};

struct Options {
  std::string model = "bench/models/v2-lite", folder = "/tmp/fathom-weights-bench";
  int64_t layers = 5;
  std::vector<int> threads = {0};
  bool json = false;
};

void run(const Options& options) {
  check(cudaFree(nullptr), "the device");
  const auto shape = Checkpoint::open_dummy(options.model, options.layers);
  if (!shape) fail(shape.error().message);
  fs::create_directories(options.folder);
  write_config(options.model, options.layers, options.folder);
  const auto shards = plan_shards(*shape, options.folder);
  double bytes = 0;
  for (const Shard& shard : shards) bytes += static_cast<double>(shard.bytes);
  const double writing = seconds_of(
      [&] { in_threads(static_cast<int>(shards.size()), [&](int i) { write_shard(shards[i]); }); });
  const auto checkpoint = Checkpoint::open(options.folder);
  if (!checkpoint) fail(checkpoint.error().message);
  const auto loaded = [&](const Checkpoint& from, int threads, bool quantize) {
    LoadOptions load;
    load.num_threads = threads;
    load.show_progress = false;
    load.quantize_fp8 = quantize;
    const ModelSpec spec = make_spec(from.config());
    const WeightForms forms(from, StoredFp8::kKept, load);
    const auto types = layer_forms(spec, forms);
    const WeightsOfRank rank = {spec, types, DeviceContext::current()};
    auto weights = load_weights(from, {&rank, 1}, load);
    if (!weights) fail(weights.error().message);
    return std::move(weights->front());
  };
  const auto rate = [&](const Checkpoint& from, int threads, bool quantize) {
    return bytes / 1e9 / seconds_of([&] { loaded(from, threads, quantize); });
  };
  const bool wide = shape->config().quantization.kind == QuantizationConfig::Kind::kNone;
  const char* separator = "";
  const auto line = [&](const char* what, int threads, double gb_s) {
    std::printf(options.json ? "%s\n  {\"what\": \"%s\", \"threads\": %d, \"gb_s\": %.2f}"
                             : "%s%-40s %4d %7.2f GB/s\n",
                separator, what, threads, gb_s);
    if (options.json) separator = ",";
    std::fflush(stdout);
  };
  // Without the weights themselves.
  const auto memory = [&](const char* what, const Checkpoint& from, int threads, bool quantize) {
    const int64_t before = MemoryWatch::device_in_use();
    MemoryWatch watch;
    const auto weights = loaded(from, threads, quantize);
    const auto most = watch.stop();
    const double stay = static_cast<double>(MemoryWatch::device_in_use() - before);
    std::printf(options.json
                    ? "%s\n  {\"what\": \"%s\", \"threads\": %d, \"weights_mb\": %.1f, "
                      "\"device_mb_beside\": %.1f, \"host_mb\": %.1f}"
                    : "%s%-40s %4d %9.1f MB stay, at most %.1f beside them, %.1f on the host\n",
                separator, what, threads, stay / 1e6, (most.device - stay) / 1e6, most.host / 1e6);
    if (options.json) separator = ",";
  };
  std::printf(options.json ? "{\"device\": \"%s\", \"gb\": %.2f, \"cores\": %u, \"results\": ["
                           : "%s, %.2f GB, %u cores\n",
              device_line().c_str(), bytes / 1e9, std::thread::hardware_concurrency());
  line("written to the disk", static_cast<int>(shards.size()), bytes / 1e9 / writing);
  line("pinned memory copied to the device", 1, copy_rate());
  rate(*shape, 1, false);
  line("made up on the device", 1, rate(*shape, 1, false));
  for (const int threads : options.threads) {
    const int readers = threads > 0 ? threads : 16;
    line("page cache read", readers, bytes / 1e9 / read_seconds(shards, readers));
    memory("memory, loading", *checkpoint, threads, false);
    line("loaded from the page cache", threads, rate(*checkpoint, threads, false));
    if (!wide) continue;
    memory("memory, quantising while loading", *checkpoint, threads, true);
    line("the same, quantised to FP8", threads, rate(*checkpoint, threads, true));
  }
  forget(shards);
  line("disk read", 16, bytes / 1e9 / read_seconds(shards, 16));
  for (const int threads : options.threads) {
    forget(shards);
    line("loaded from the disk", threads, rate(*checkpoint, threads, false));
  }
  if (options.json) std::printf("\n]}\n");
  fs::remove_all(options.folder);
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  fathom::cuda::Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const bool has_value = i + 1 < argc;
    if (flag == "--json") {
      options.json = true;
    } else if (flag == "--layers" && has_value) {
      options.layers = std::stoll(argv[++i]);
    } else if (flag == "--folder" && has_value) {
      options.folder = argv[++i];
    } else if (flag == "--threads" && has_value) {
      options.threads.clear();
      std::stringstream list(argv[++i]);
      for (std::string count; std::getline(list, count, ',');) {
        options.threads.push_back(std::stoi(count));
      }
    } else {
      options.model = flag;
    }
  }
  try {
    fathom::cuda::run(options);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
}
