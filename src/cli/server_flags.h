// Flags that `fathom serve` and `fathom route` have in common: the network and the operation.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/status.h"
#include "cli/flags.h"
#include "server/http/server_options.h"

namespace fathom {

struct ServerFlags {
  http::ServerOptions http;
  std::vector<std::string> key_files;
  int64_t port = 8000, body_mib = 32, shutdown_seconds = 30;
  std::string log_level = "info";
  std::optional<bool> log_requests;
  std::string config;  // applied by the command line before the command runs
};

// Adds the groups "Network" and "Operation".
void add_server_flags(CLI::App& command, ServerFlags* flags);

// Reads the key files. An error names the flag.
Result<http::ServerOptions> server_options(const ServerFlags& flags);

LogLevel log_level_of(const std::string& name);

}  // namespace fathom
