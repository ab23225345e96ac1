#include "cli/server_flags.h"

#include <CLI/CLI.hpp>
#include <fstream>

namespace fathom {
namespace {

// Reads one key per line; empty lines and lines that begin with '#' are ignored.
Result<> read_keys(const std::string& path, std::vector<std::string>* keys) {
  std::ifstream file(path);
  if (!file) return not_found("--api-key-file: {} cannot be read", path);
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (!line.empty() && line.front() != '#') keys->push_back(line);
  }
  return {};
}

}  // namespace

void add_server_flags(CLI::App& command, ServerFlags* flags) {
  FlagGroup network(command, "Network");
  network.text("--host", &flags->http.host, "HOST", "Address to listen on");
  network.count("--port", &flags->port, 0, 65535, "Port; 0 takes any that is free");
  network.texts("--api-key", &flags->http.api_keys, "KEY", "Key that clients must send");
  network.texts("--api-key-file", &flags->key_files, "FILE", "File with such keys, one per line");
  network.texts("--admin-api-key", &flags->http.admin_keys, "KEY",
                "Key that may use every endpoint");
  network.text("--ssl-certfile", &flags->http.tls_certificate_file, "FILE",
               "Certificate with its chain (PEM), for HTTPS");
  network.text("--ssl-keyfile", &flags->http.tls_key_file, "FILE",
               "Private key of the certificate (PEM)");
  network.texts("--allowed-origins", &flags->http.cors_origins, "ORIGIN",
                "Origin whose pages may call the server, * for all (CORS)");
  network.texts("--allowed-hosts", &flags->http.allowed_hosts, "NAME",
                "Host name that clients may use, * for all; checked without an API key");
  network.count("--max-connections", &flags->http.max_connections, 1, 1 << 20,
                "Maximum number of open connections; more get 503");
  network.count("--max-body-mib", &flags->body_mib, 1, 1024, "Largest request in MiB");
  FlagGroup operation(command, "Operation");
  operation.count("--shutdown-timeout", &flags->shutdown_seconds, 0, 86'400,
                  "Seconds that running requests may take after SIGTERM");
  operation.choice("--log-level", &flags->log_level, {"debug", "info", "warning", "error"},
                   "Lowest level that is logged");
  operation.toggle(
      "--log-requests,--enable-log-requests,!--no-log-requests,!--no-enable-log-requests,"
      "!--disable-log-requests",
      &flags->log_requests, "Log one line per request (default: on)");
  operation.text(
      "--config", &flags->config, "FILE",
      "YAML file of flags, \"max-num-seqs: 64\"; command line and environment take precedence");
}

Result<http::ServerOptions> server_options(const ServerFlags& flags) {
  http::ServerOptions options = flags.http;
  options.port = static_cast<int>(flags.port);
  options.max_body_bytes = flags.body_mib << 20;
  options.access_log = flags.log_requests.value_or(true);
  for (const std::string& file : flags.key_files) {
    FATHOM_RETURN_IF_ERROR(read_keys(file, &options.api_keys));
  }
  return options;
}

LogLevel log_level_of(const std::string& name) {
  return name == "debug"     ? LogLevel::kDebug
         : name == "warning" ? LogLevel::kWarning
         : name == "error"   ? LogLevel::kError
                             : LogLevel::kInfo;
}

}  // namespace fathom
