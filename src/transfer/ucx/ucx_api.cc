#include "transfer/ucx/ucx_api.h"

#include <dlfcn.h>

#include <array>
#include <csignal>
#include <cstdlib>

namespace fathom {
namespace {

// UCX takes signals when it is loaded, SIGHUP and those of crashes among them: they are given back.
class KeptSignals {
 public:
  KeptSignals() {
    for (size_t i = 1; i < actions_.size(); ++i) {
      sigaction(static_cast<int>(i), nullptr, &actions_[i]);
    }
  }
  ~KeptSignals() {
    for (size_t i = 1; i < actions_.size(); ++i) {
      if (i == SIGKILL || i == SIGSTOP) continue;
      sigaction(static_cast<int>(i), &actions_[i], nullptr);
    }
  }
  KeptSignals(const KeptSignals&) = delete;
  KeptSignals& operator=(const KeptSignals&) = delete;

 private:
  std::array<struct sigaction, 32> actions_{};
};

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

bool find_all(void* ucp, void* ucs, UcxApi& api) {
  return find(ucp, "ucp_am_recv_data_nbx", api.am_recv_data) &&
         find(ucp, "ucp_am_send_nbx", api.am_send) &&
         find(ucp, "ucp_config_modify", api.config_modify) &&
         find(ucp, "ucp_config_read", api.config_read) &&
         find(ucp, "ucp_config_release", api.config_release) &&
         find(ucp, "ucp_ep_create", api.ep_create) &&
         find(ucp, "ucp_init_version", api.init_version) &&
         find(ucp, "ucp_request_free", api.request_free) &&
         find(ucp, "ucp_worker_arm", api.worker_arm) &&
         find(ucp, "ucp_worker_create", api.worker_create) &&
         find(ucp, "ucp_worker_destroy", api.worker_destroy) &&
         find(ucp, "ucp_worker_get_address", api.worker_get_address) &&
         find(ucp, "ucp_worker_get_efd", api.worker_get_efd) &&
         find(ucp, "ucp_worker_progress", api.worker_progress) &&
         find(ucp, "ucp_worker_release_address", api.worker_release_address) &&
         find(ucp, "ucp_worker_set_am_recv_handler", api.worker_set_am_recv_handler) &&
         find(ucs, "ucs_status_string", api.status_string);
}

Result<> make_context(UcxApi& api) {
  ucp_config_t* config = nullptr;
  ucs_status_t status = api.config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) {
    return error(Code::kUnavailable, "UCX's configuration: {}", api.status_string(status));
  }
  // UCX's own TCP would listen at a port of its own, without a secret.
  if (std::getenv("UCX_TLS") == nullptr) api.config_modify(config, "TLS", "sm");
  // The cache of registered memory replaces the process's mmap() and munmap().
  api.config_modify(config, "RCACHE_ENABLE", "n");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  status = api.init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &api.context);
  api.config_release(config);
  if (status != UCS_OK) {
    return error(Code::kUnavailable, "UCX cannot be used: {}", api.status_string(status));
  }
  return {};
}

Result<UcxApi> load() {
  const KeptSignals kept;
  void* const ucs = dlopen("libucs.so.0", RTLD_NOW | RTLD_LOCAL);
  void* const ucp = dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL);
  UcxApi api;
  if (ucs == nullptr || ucp == nullptr) {
    const char* const why = dlerror();
    return error(Code::kUnavailable, "UCX (libucx0) cannot be loaded: {}", why ? why : "");
  }
  if (!find_all(ucp, ucs, api)) {
    return error(Code::kUnavailable, "the UCX that is installed is older than 1.13");
  }
  // It would tell on standard output what a lost end has left.
  ucs_status_t (*set_option)(const char*, const char*) = nullptr;
  if (std::getenv("UCX_LOG_LEVEL") == nullptr &&
      find(ucs, "ucs_global_opts_set_value", set_option)) {
    set_option("LOG_LEVEL", "fatal");
  }
  FATHOM_RETURN_IF_ERROR(make_context(api));
  return api;
}

}  // namespace

Result<const UcxApi*> ucx_api() {
  static const Result<UcxApi> api = load();
  if (!api) return tl::unexpected(api.error());
  return &*api;
}

}  // namespace fathom
