// Endpoints and errors of the whole server over a fake model.
#include "server/api/api_server.h"

#include <gtest/gtest.h>

#include <latch>
#include <vector>

#include "grammar/grammar_compiler.h"
#include "server/api/api_test_support.h"
#include "server/http/raw_client.h"
#include "server/http/server_fixture.h"

namespace fathom {
namespace {

http::RawResponse answer_to(const ApiServer& server, const std::string& request) {
  http::RawClient client(server.port());
  client.send(request);
  return client.read_response();
}

std::string load_of(const ApiServer& server) {
  return answer_to(server, bare_request("GET", "/load")).body;
}

// One sequence at a time, so that the two requests that come during its step wait.
TEST(ApiServer, LoadCountsWhatRunsAndWhatWaits) {
  std::latch may_go_on(1);
  auto runner = std::make_unique<FakeRunner>(FakeModel());
  runner->before_step = [&may_go_on](const ForwardBatch&) -> Result<> {
    may_go_on.wait();
    return {};
  };
  auto backend = fake_backend(std::move(runner), {.max_num_seqs = 1});
  const Engine& engine = *backend->engine;
  const auto server = listening_server();
  server->serve(std::move(backend));
  EXPECT_EQ(load_of(*server), R"({"server_load":0})");
  std::vector<http::RawClient> clients;
  for (int i = 0; i < 3; ++i) {
    clients.emplace_back(server->port());
    clients.back().send(post_request("/v1/completions", R"({"prompt":[1,2,3],"max_tokens":2})"));
  }
  EXPECT_TRUE(http::eventually([&] {
    const EngineStats stats = engine.stats();
    return stats.running == 1 && stats.queued_requests == 2;
  }));
  EXPECT_EQ(load_of(*server), R"({"server_load":3})");
  may_go_on.count_down();
  for (http::RawClient& client : clients) EXPECT_EQ(client.read_response().status, 200);
  EXPECT_TRUE(http::eventually([&] { return engine.stats().running == 0; }));
  EXPECT_EQ(load_of(*server), R"({"server_load":0})");
}

// The tokens for the grammar end before 'z': what it asks for is found missing within the answer.
TEST(ApiServer, ADeadEndWithinAnAnswerIsTheClientsError) {
  auto backend = fake_backend(std::make_unique<FakeRunner>(FakeModel()));
  backend->grammars = std::make_unique<GrammarCompiler>(
      backend->served.tokenizer, /*vocab_size=*/'z',
      GrammarCompilerOptions{.deadline = GrammarCompilerOptions::kPatient});
  const auto server = listening_server();
  server->serve(std::move(backend));
  const auto answer = [&](std::string_view stream) {
    return answer_to(
        *server, post_request("/v1/completions",
                              fmt::format(R"({{"prompt":[1],"guided_choice":["xyz"],"stream":{}}})",
                                          stream)));
  };
  const std::string error =
      R"({"error":{"message":"the grammar has a dead end: nothing may follow the 2 tokens of the )"
      R"(answer so far, which is not whole","type":"invalid_request_error","param":null,)"
      R"("code":null}})";
  const http::RawResponse whole = answer("false");
  EXPECT_EQ(whole.status, 400);
  EXPECT_EQ(whole.body, error);
  const http::RawResponse streamed = answer("true");
  EXPECT_EQ(streamed.status, 200);
  EXPECT_TRUE(streamed.complete);
  EXPECT_TRUE(streamed.body.ends_with("data: " + error + "\n\n")) << streamed.body;
}

// Clients of other servers read why, whatever they try, and not that another method would do.
TEST(ApiServer, WhatIsNotServedSaysSo) {
  const std::string batch = "a batch is not available at ",
                    no_batch = ": send its requests one by one, they are computed together",
                    text_only = ": this server generates text only",
                    no_lora = ": the model is served as it was loaded";
  const std::pair<std::string, std::string> kMissing[] = {
      {"/v1/batches", batch + "/v1/batches" + no_batch},
      {"/v1/batches/batch_1", batch + "/v1/batches/batch_1" + no_batch},
      {"/v1/messages/batches", batch + "/v1/messages/batches" + no_batch},
      {"/v1/messages/batches/1", batch + "/v1/messages/batches/1" + no_batch},
      {"/v1/audio/speech", "speech is not available at /v1/audio/speech" + text_only},
      {"/v1/audio/transcriptions",
       "transcribing speech is not available at /v1/audio/transcriptions" + text_only},
      {"/v1/audio/translations",
       "translating speech is not available at /v1/audio/translations" + text_only},
      {"/v1/load_lora_adapter",
       "loading a LoRA adapter is not available at /v1/load_lora_adapter" + no_lora},
      {"/unload_lora_adapter",
       "unloading a LoRA adapter is not available at /unload_lora_adapter" + no_lora}};
  const auto server = listening_server();
  for (const auto& [path, message] : kMissing) {
    for (const char* method : {"GET", "POST", "PUT", "DELETE"}) {
      const http::RawResponse response = answer_to(*server, bare_request(method, path));
      EXPECT_EQ(response.status, 404) << method << " " << path;
      EXPECT_EQ(response.body,
                fmt::format(R"({{"error":{{"message":"{}","type":"not_found_error","param":null,)"
                            R"("code":"not_supported"}}}})",
                            message))
          << method;
    }
  }
  EXPECT_EQ(answer_to(*server,
                      "GET /v1/messages/batches HTTP/1.1\r\nHost: localhost\r\n"
                      "anthropic-version: 2023-06-01\r\n\r\n")
                .body,
            R"({"type":"error","error":{"type":"not_found_error","message":"a batch is not )"
            R"(available at /v1/messages/batches: send its requests one by one, they are )"
            R"(computed together"}})");
}

}  // namespace
}  // namespace fathom
