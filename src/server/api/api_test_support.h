// Shared by this room's tests: a server over a fake model, and requests as bytes. Test code only.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "engine/fake_runner.h"
#include "server/api/api_server.h"

namespace fathom {

inline std::unique_ptr<Backend> fake_backend(std::unique_ptr<Runner> runner,
                                             const EngineOptions& options = {}) {
  auto backend = std::make_unique<Backend>();
  backend->served.names = {"fake"};
  backend->served.tokenizer = fake_tokenizer();
  backend->served.vocab_size = FakeModel().vocab_size;
  backend->served.max_model_len = FakeModel().max_model_len;
  backend->engine =
      std::move(*Engine::create(options, std::move(runner), backend->served.tokenizer));
  return backend;
}

// Returns a server that listens on a free port and has no model yet.
inline std::unique_ptr<ApiServer> listening_server(ApiOptions options = {}) {
  options.http.port = 0;
  auto server = std::move(*ApiServer::create(std::move(options)));
  EXPECT_TRUE(server->listen());
  server->start();
  return server;
}

inline std::string post_request(std::string_view path, std::string_view body) {
  return fmt::format(
      "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
      "Content-Length: {}\r\n\r\n{}",
      path, body.size(), body);
}

// Without a body.
inline std::string bare_request(std::string_view method, std::string_view path) {
  return fmt::format("{} {} HTTP/1.1\r\nHost: localhost\r\n\r\n", method, path);
}

}  // namespace fathom
