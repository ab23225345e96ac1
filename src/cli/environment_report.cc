#include "cli/environment_report.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <optional>

#include "base/version.h"
#include "device/cpu/isa.h"
#include "engine/gpu_runner.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

// The targets of the kernels: device/cpu/isa.h, cmake/FathomTargets.cmake.
constexpr const char* kCpuKernels = "scalar, avx2, avx512, amx";
constexpr const char* kGpuArchitectures = "sm_90a";
constexpr const char* kNccl = "none";  // not linked

bool has_cuda() { return *program_cuda() != '\0'; }

json::value or_null(const std::optional<std::string>& text) {
  return text ? json::value(*text) : json::value(nullptr);
}

std::optional<std::string> first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

std::string trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\"");
  if (first == std::string_view::npos) return "";
  return std::string(text.substr(first, text.find_last_not_of(" \t\"") - first + 1));
}

// The value of the first line "name: value" or "name=value" in a file.
std::optional<std::string> field(const std::string& path, std::string_view name, char separator) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t at = line.find(separator);
    if (at != std::string::npos && trimmed(std::string_view(line).substr(0, at)) == name) {
      return trimmed(std::string_view(line).substr(at + 1));
    }
  }
  return std::nullopt;
}

json::object program() {
  return {{"version", program_version()},
          {"commit", program_commit()},
          {"build_type", FATHOM_BUILD_TYPE},
          {"compiler", FATHOM_COMPILER},
          {"sanitizers", *FATHOM_SANITIZERS == '\0' ? "none" : FATHOM_SANITIZERS},
          {"cpu_kernels", kCpuKernels},
          {"gpu_architectures", has_cuda() ? kGpuArchitectures : "none"},
          {"cuda", has_cuda() ? program_cuda() : "none"},
          {"nccl", kNccl}};
}

// Versions of the libraries at build time, parsed from "boost 1.81.0, fmt 9.1.0".
json::object libraries() {
  json::object versions;
  std::string_view rest = FATHOM_LIBRARIES;
  while (!rest.empty()) {
    const std::string_view one = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), one.size() + 1));
    const size_t space = one.rfind(' ');
    versions[trimmed(one.substr(0, space))] = one.substr(space + 1);
  }
  return versions;
}

json::object cpu() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  json::value usable = nullptr;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) usable = CPU_COUNT(&allowed);
  return {{"model", or_null(field("/proc/cpuinfo", "model name", ':'))},
          {"isa", name_of(cpu_isa())},
          {"cores_online", sysconf(_SC_NPROCESSORS_ONLN)},
          {"cores_usable", usable},
          // "max 100000" or "150000 100000": CPU microseconds per period.
          {"cgroup_cpu_max", or_null(first_line("/sys/fs/cgroup/cpu.max"))}};
}

// The GPUs that this program can use; an unusable one does not appear as a device.
json::object gpus() {
  json::object object;
  const int count = num_gpus();
  object["usable"] = count;
  for (int device = 0; device < count; ++device) {
    object[fmt::format("cuda:{}", device)] = gpu_name(device);
  }
  if (count > 0) {
    const std::string library = cublas_lt_version();
    object["cublas_lt"] = library.empty() ? "not found" : library;
  }
  object["driver"] = or_null(first_line("/proc/driver/nvidia/version"));
  return object;
}

json::object memory() {
  return {{"total", or_null(field("/proc/meminfo", "MemTotal", ':'))},
          {"available", or_null(field("/proc/meminfo", "MemAvailable", ':'))},
          {"swap_free", or_null(field("/proc/meminfo", "SwapFree", ':'))},
          {"cgroup_memory_max", or_null(first_line("/sys/fs/cgroup/memory.max"))},
          {"numa_nodes_online", or_null(first_line("/sys/devices/system/node/online"))},
          {"transparent_huge_pages",
           or_null(first_line("/sys/kernel/mm/transparent_hugepage/enabled"))},
          {"huge_pages", or_null(field("/proc/meminfo", "HugePages_Total", ':'))},
          {"huge_page_size", or_null(field("/proc/meminfo", "Hugepagesize", ':'))}};
}

json::object system() {
  utsname names{};
  json::object object;
  const bool known = uname(&names) == 0;
  object["kernel"] = known ? json::value(fmt::format("{} {}", names.sysname, names.release))
                           : json::value(nullptr);
  object["architecture"] = known ? json::value(names.machine) : json::value(nullptr);
  object["distribution"] = or_null(field("/etc/os-release", "PRETTY_NAME", '='));
  object["open_files_limit"] = sysconf(_SC_OPEN_MAX);
  return object;
}

// FATHOM_API_KEY and FATHOM_ADMIN_API_KEY are secrets; FATHOM_API_KEY_FILE is a path.
bool is_secret(std::string_view name) { return name.ends_with("KEY"); }

json::object variables() {
  std::map<std::string, std::string> found;
  for (char** one = environ; one != nullptr && *one != nullptr; ++one) {
    const std::string_view text = *one;
    const std::string name(text.substr(0, text.find('=')));
    const bool is_heeded = name.starts_with("FATHOM_") || name == "HF_HOME" ||
                           name == "HF_HUB_CACHE" || name == "NO_COLOR";
    if (!is_heeded) continue;
    found[name] = is_secret(name) ? "(set)" : std::string(text.substr(name.size() + 1));
  }
  json::object object;
  for (const auto& [name, value] : found) object[name] = value;
  return object;
}

}  // namespace

json::object environment_report() {
  return {{"fathom", program()},
          {"libraries", libraries()},
          {"cpu", cpu()},
          {"gpu", gpus()},
          {"memory", memory()},
          {"system", system()},
          {"environment", variables()}};
}

std::string version_text() {
  std::string text = fmt::format("fathom {}\ncommit {}\nCPU: {}; here {}\n", program_version(),
                                 program_commit(), kCpuKernels, name_of(cpu_isa()));
  return text + (has_cuda() ? fmt::format("GPU: {}, CUDA {}, NCCL {}", kGpuArchitectures,
                                          program_cuda(), kNccl)
                            : "GPU: none, built without CUDA and NCCL");
}

std::string environment_text(const json::object& report) {
  std::string text;
  for (const auto& [section, values] : report) {
    text += fmt::format("{}{}\n", text.empty() ? "" : "\n", std::string_view(section));
    for (const auto& [name, value] : values.as_object()) {
      text += fmt::format("  {:<24}{}\n", std::string_view(name),
                          value.is_string() ? std::string(value.as_string())
                          : value.is_null() ? "unknown"
                                            : json::serialize(value));
    }
    if (values.as_object().empty()) text += "  none\n";
  }
  return text;
}

}  // namespace fathom
