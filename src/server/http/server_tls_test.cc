// TLS with a certificate made by the test: same responses, and input that is not TLS is refused.
#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <atomic>
#include <filesystem>
#include <string>
#include <vector>

#include "server/http/farewell.h"
#include "server/http/server_fixture.h"
#include "server/http/sse.h"

namespace fathom::http {
namespace {

using namespace std::chrono_literals;

// Writes a self-signed certificate and its key as PEM files.
void make_certificate(const std::string& certificate_file, const std::string& key_file) {
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* certificate = X509_new();
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
  X509_gmtime_adj(X509_getm_notBefore(certificate), 0);
  X509_gmtime_adj(X509_getm_notAfter(certificate), 3600);
  X509_set_pubkey(certificate, key);
  X509_NAME* name = X509_get_subject_name(certificate);
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>("localhost"), -1, -1, 0);
  X509_set_issuer_name(certificate, name);
  X509_sign(certificate, key, EVP_sha256());
  FILE* file = fopen(certificate_file.c_str(), "w");
  PEM_write_X509(file, certificate);
  fclose(file);
  file = fopen(key_file.c_str(), "w");
  PEM_write_PrivateKey(file, key, nullptr, nullptr, 0, nullptr, nullptr);
  fclose(file);
  X509_free(certificate);
  EVP_PKEY_free(key);
}

class TlsClient {
 public:
  explicit TlsClient(int port, int newest = TLS1_3_VERSION)
      : plain_(port), context_(SSL_CTX_new(TLS_client_method())), ssl_(SSL_new(context_)) {
    SSL_set_min_proto_version(ssl_, TLS1_VERSION);
    SSL_set_max_proto_version(ssl_, newest);
    SSL_set_fd(ssl_, plain_.descriptor());
    connected_ = SSL_connect(ssl_) == 1;
  }
  ~TlsClient() {
    SSL_free(ssl_);
    SSL_CTX_free(context_);
  }
  TlsClient(const TlsClient&) = delete;
  TlsClient& operator=(const TlsClient&) = delete;

  bool connected() const { return connected_; }
  std::string protocol() const { return SSL_get_version(ssl_); }
  void send(std::string_view bytes) {
    SSL_write(ssl_, bytes.data(), static_cast<int>(bytes.size()));
  }
  std::string read_until(std::string_view text) {
    while (input_.find(text) == std::string::npos && receive()) {
    }
    return std::exchange(input_, "");
  }
  std::string read_to_end() {
    while (receive()) {
    }
    return std::exchange(input_, "");
  }
  // Returns whether the server sent close_notify.
  bool ended() const { return (SSL_get_shutdown(ssl_) & SSL_RECEIVED_SHUTDOWN) != 0; }

 private:
  bool receive() {
    char bytes[16384];
    const int count = SSL_read(ssl_, bytes, sizeof(bytes));
    if (count > 0) input_.append(bytes, static_cast<size_t>(count));
    return count > 0;
  }

  RawClient plain_;
  SSL_CTX* context_;
  SSL* ssl_;
  bool connected_ = false;
  std::string input_;
};

class ServerTls : public ServerTest {
 protected:
  void SetUp() override {
    folder_ =
        std::filesystem::temp_directory_path() / ("fathom_tls_test_" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
    make_certificate(folder_ / "cert.pem", folder_ / "key.pem");
  }
  void TearDown() override {
    server.reset();
    std::filesystem::remove_all(folder_);
  }
  ServerOptions tls_options() {
    ServerOptions options = test_options();
    options.tls_certificate_file = folder_ / "cert.pem";
    options.tls_key_file = folder_ / "key.pem";
    return options;
  }
  std::filesystem::path folder_;
};

TEST_F(ServerTls, ServesWithinTls) {
  serve(tls_options());
  TlsClient one(server->port());
  ASSERT_TRUE(one.connected());
  EXPECT_EQ(one.protocol(), "TLSv1.3");
  for (int i = 0; i < 3; ++i) {
    one.send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
    EXPECT_TRUE(one.read_until("hello").ends_with("hello"));
  }
  one.send("GET /hello HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  EXPECT_TRUE(one.read_to_end().ends_with("\r\n\r\nhello"));
  EXPECT_TRUE(one.ended());
}

TEST_F(ServerTls, CarriesLargeBodiesBothWays) {
  serve(tls_options());
  TlsClient one(server->port(), TLS1_2_VERSION);
  EXPECT_EQ(one.protocol(), "TLSv1.2");
  std::string body;
  for (int i = 0; std::ssize(body) < (5 << 20); ++i) body += std::to_string(i);
  one.send("POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: " +
           std::to_string(body.size()) + "\r\n\r\n" + body);
  const std::string answer = one.read_to_end();
  EXPECT_TRUE(answer.substr(answer.find("\r\n\r\n") + 4) == body);
}

TEST_F(ServerTls, StreamsAndNoticesTheEnd) {
  serve(tls_options());
  std::atomic<bool> told{false};
  std::shared_ptr<Responder> responder;
  {
    TlsClient one(server->port());
    one.send("GET /hold HTTP/1.1\r\nHost: x\r\n\r\n");
    responder = held.take().responder;
    responder->on_closed([&] { told = true; });
    SseStream stream(responder);
    for (int i = 0; i < 100; ++i) {
      const std::string event = "data: " + std::to_string(i) + "\n\n";
      stream.data(std::to_string(i));
      EXPECT_NE(one.read_until(event).find(event), std::string::npos);
    }
    EXPECT_FALSE(told);
  }
  EXPECT_TRUE(eventually([&] { return told.load(); }));
}

TEST_F(ServerTls, RefusesWhatIsNotTls) {
  ServerOptions options = tls_options();
  options.header_timeout = 200ms;
  options.check_interval = 60s;  // the timer does not depend on it
  serve(options);
  RawClient plain = client();
  plain.send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(plain.read_to_end().find("HTTP/"), std::string::npos);
  RawClient silent = client();
  EXPECT_EQ(silent.read_to_end(), "");  // the handshake timed out
  EXPECT_TRUE(silent.ended() || silent.was_reset());
  EXPECT_FALSE(TlsClient(server->port(), TLS1_1_VERSION).connected());
  TlsClient good(server->port());
  EXPECT_TRUE(good.connected());
}

// Above max_connections the answer is the one that a client in the clear gets.
TEST_F(ServerTls, TellsThoseAboveTheLimit) {
  ServerOptions options = tls_options();
  options.max_connections = 1;
  options.linger_timeout = 60s;
  serve(options);
  TlsClient first(server->port());
  ASSERT_TRUE(first.connected());
  for (const int newest : {TLS1_3_VERSION, TLS1_2_VERSION}) {
    TlsClient second(server->port(), newest);
    ASSERT_TRUE(second.connected());
    second.send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhe");
    const std::string answer = second.read_to_end();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 503 ")) << answer;
    EXPECT_NE(answer.find("\r\nRetry-After: 1\r\n"), std::string::npos) << answer;
    EXPECT_NE(answer.find("more than 1 connections"), std::string::npos) << answer;
    EXPECT_TRUE(second.ended());
  }
  const auto stats = server->stats();
  EXPECT_EQ(stats.connections_refused, 2);
  EXPECT_EQ(stats.responses[5], 2);
  first.send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_TRUE(first.read_until("hello").ends_with("hello"));
}

TEST_F(ServerTls, BoundsTheHandshakesAboveTheLimit) {
  ServerOptions options = tls_options();
  options.max_connections = 1;
  options.linger_timeout = 10min;  // no time limit makes room
  serve(options);
  TlsClient first(server->port());
  ASSERT_TRUE(first.connected());
  std::vector<RawClient> silent;
  for (size_t i = 0; i < Farewell::kMostHandshakes; ++i) silent.push_back(client());
  RawClient one_more = client();  // closed, not told
  EXPECT_EQ(one_more.read_to_end(), "");
  EXPECT_TRUE(one_more.ended() || one_more.was_reset());
  // Each that leaves, or that speaks no TLS, makes room.
  silent[0].close();
  silent[1].send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(silent[1].read_to_end().find("HTTP/"), std::string::npos);
  EXPECT_TRUE(eventually([&] { return TlsClient(server->port()).connected(); }));
}

TEST_F(ServerTls, WaitsForNoHandshakeAboveTheLimitForLong) {
  ServerOptions options = tls_options();
  options.max_connections = 1;
  options.linger_timeout = 200ms;
  serve(options);
  TlsClient first(server->port());
  ASSERT_TRUE(first.connected());
  RawClient silent = client();
  EXPECT_EQ(silent.read_to_end(), "");
  EXPECT_TRUE(silent.ended() || silent.was_reset());
}

TEST_F(ServerTls, NamesTheFileThatIsWrong) {
  const auto refusal = [&](const std::string& certificate, const std::string& key) {
    ServerOptions options = test_options();
    options.tls_certificate_file = folder_ / certificate;
    options.tls_key_file = folder_ / key;
    const auto made = Server::create(options, RouteTable());
    return made ? "" : made.error().message;
  };
  make_certificate(folder_ / "cert2.pem", folder_ / "key2.pem");
  EXPECT_EQ(refusal("cert.pem", "key.pem"), "");
  EXPECT_NE(refusal("absent.pem", "key.pem").find("absent.pem"), std::string::npos);
  EXPECT_NE(refusal("key.pem", "key.pem").find("TLS certificate file"), std::string::npos);
  EXPECT_NE(refusal("cert.pem", "cert.pem").find("TLS key file"), std::string::npos);
  EXPECT_NE(refusal("cert.pem", "key2.pem").find("key2.pem"), std::string::npos);
}

}  // namespace
}  // namespace fathom::http
