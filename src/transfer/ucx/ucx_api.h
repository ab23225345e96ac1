// The functions of UCX's libraries that are used here, found when a lane is wanted for the first
// time: a program that needs none runs where UCX is not installed, and is not changed by it.
#pragma once

#include <ucp/api/ucp.h>

#include "base/status.h"

namespace fathom {

struct UcxApi {
  decltype(&::ucp_am_recv_data_nbx) am_recv_data = nullptr;
  decltype(&::ucp_am_send_nbx) am_send = nullptr;
  decltype(&::ucp_config_modify) config_modify = nullptr;
  decltype(&::ucp_config_read) config_read = nullptr;
  decltype(&::ucp_config_release) config_release = nullptr;
  decltype(&::ucp_ep_create) ep_create = nullptr;
  decltype(&::ucp_init_version) init_version = nullptr;
  decltype(&::ucp_request_free) request_free = nullptr;
  decltype(&::ucp_worker_arm) worker_arm = nullptr;
  decltype(&::ucp_worker_create) worker_create = nullptr;
  decltype(&::ucp_worker_destroy) worker_destroy = nullptr;
  decltype(&::ucp_worker_get_address) worker_get_address = nullptr;
  decltype(&::ucp_worker_get_efd) worker_get_efd = nullptr;
  decltype(&::ucp_worker_progress) worker_progress = nullptr;
  decltype(&::ucp_worker_release_address) worker_release_address = nullptr;
  decltype(&::ucp_worker_set_am_recv_handler) worker_set_am_recv_handler = nullptr;
  decltype(&::ucs_status_string) status_string = nullptr;
  ucp_context_h context = nullptr;  // of the process, never destroyed
};

// Loads the libraries and makes the context, once. kUnavailable: why that is not possible. Any
// thread.
Result<const UcxApi*> ucx_api();

}  // namespace fathom
