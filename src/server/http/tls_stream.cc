// TLS with OpenSSL over a non-blocking descriptor.
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <new>
#include <utility>

#include "server/http/byte_stream.h"

namespace fathom::http {
namespace {

// Pops OpenSSL's last error and returns its reason: "no start line", "key values mismatch".
std::string last_complaint() {
  const unsigned long code = ERR_get_error();
  ERR_clear_error();
  const char* reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  return reason == nullptr ? "cannot be read" : reason;
}

// OpenSSL writes with write(2); the I/O threads block its SIGPIPE (server.cc).
class TlsStream : public ByteStream {
 public:
  TlsStream(SSL_CTX* context, int descriptor)
      : owned_(SSL_new(context), &SSL_free), ssl_(owned_.get()), descriptor_(descriptor) {
    if (ssl_ == nullptr || SSL_set_fd(ssl_, descriptor) != 1) throw std::bad_alloc();
    SSL_set_accept_state(ssl_);
  }

  IoResult handshake() override {
    ERR_clear_error();
    return result(SSL_do_handshake(ssl_), 0);
  }

  IoResult read(std::span<char> into) override {
    ERR_clear_error();
    size_t count = 0;
    const int returned = SSL_read_ex(ssl_, into.data(), into.size(), &count);
    return result(returned, count);
  }

  IoResult write(std::span<const std::string_view> parts) override {
    ERR_clear_error();
    size_t count = 0;
    const int returned = SSL_write_ex(ssl_, parts[0].data(), parts[0].size(), &count);
    return result(returned, count);
  }

  void finish() override {
    ERR_clear_error();
    if (SSL_is_init_finished(ssl_) && !failed_) SSL_shutdown(ssl_);
    ::shutdown(descriptor_, SHUT_WR);
  }

 private:
  IoResult result(int returned, size_t count) {
    if (returned == 1) return {IoStatus::kDone, count};
    switch (SSL_get_error(ssl_, returned)) {
      case SSL_ERROR_WANT_READ:
        return {IoStatus::kWantRead, 0};
      case SSL_ERROR_WANT_WRITE:
        return {IoStatus::kWantWrite, 0};
      case SSL_ERROR_ZERO_RETURN:
        return {IoStatus::kEnd, 0};
      default:
        failed_ = true;  // OpenSSL forbids SSL_shutdown after a failure
        return {IoStatus::kFailed, 0};
    }
  }

  const std::unique_ptr<SSL, decltype(&SSL_free)> owned_;
  SSL* const ssl_;
  const int descriptor_;
  bool failed_ = false;
};

}  // namespace

struct TlsContext::Parts {
  SSL_CTX* context = nullptr;
  ~Parts() { SSL_CTX_free(context); }
};

TlsContext::TlsContext(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
TlsContext::~TlsContext() = default;

Result<std::unique_ptr<TlsContext>> TlsContext::load(const std::string& certificate_file,
                                                     const std::string& key_file) {
  auto parts = std::make_unique<Parts>();
  parts->context = SSL_CTX_new(TLS_server_method());
  SSL_CTX* context = parts->context;
  if (context == nullptr) return error(Code::kInternal, "TLS: {}", last_complaint());
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  // Accepts a close without close_notify: HTTP already delimits what was sent.
  SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_IGNORE_UNEXPECTED_EOF |
                                   SSL_OP_CIPHER_SERVER_PREFERENCE);
  // Releases the buffers of idle connections, and allows unsent bytes to move between two attempts.
  SSL_CTX_set_mode(context, SSL_MODE_RELEASE_BUFFERS | SSL_MODE_ENABLE_PARTIAL_WRITE |
                                SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  // Refuses encrypted keys; the default would prompt for a password on the terminal.
  SSL_CTX_set_default_passwd_cb(context, [](char*, int, int, void*) { return -1; });
  ERR_clear_error();
  if (SSL_CTX_use_certificate_chain_file(context, certificate_file.c_str()) != 1) {
    return invalid("TLS certificate file {}: {}", certificate_file, last_complaint());
  }
  if (SSL_CTX_use_PrivateKey_file(context, key_file.c_str(), SSL_FILETYPE_PEM) != 1) {
    return invalid("TLS key file {}: {}", key_file, last_complaint());
  }
  if (SSL_CTX_check_private_key(context) != 1) {
    return invalid("TLS key file {} is not the key of {}: {}", key_file, certificate_file,
                   last_complaint());
  }
  return std::unique_ptr<TlsContext>(new TlsContext(std::move(parts)));
}

std::unique_ptr<ByteStream> TlsContext::make_stream(int descriptor) const {
  return std::make_unique<TlsStream>(parts_->context, descriptor);
}

}  // namespace fathom::http
