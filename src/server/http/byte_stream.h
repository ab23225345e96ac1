// Non-blocking byte stream over one accepted connection, plain or TLS.
//
// A call that would block returns kWantRead or kWantWrite instead. Only the connection's I/O thread
// uses a stream. The caller owns the descriptor, which must be non-blocking and stay open as long
// as the stream.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace fathom::http {

enum class IoStatus {
  kDone,
  kWantRead,   // retry when the descriptor is readable
  kWantWrite,  // retry when it is writable
  kEnd,        // read: the peer will send no more
  kFailed,     // reset or protocol error
};

struct IoResult {
  IoStatus status = IoStatus::kFailed;
  size_t bytes = 0;  // with kDone: at least 1
};

class ByteStream {
 public:
  virtual ~ByteStream() = default;
  // Call it first, until it returns kDone.
  virtual IoResult handshake() = 0;
  virtual IoResult read(std::span<char> into) = 0;
  // `parts` are not empty.
  virtual IoResult write(std::span<const std::string_view> parts) = 0;
  // Tells the peer that nothing more will be written (FIN, or close_notify under TLS).
  virtual void finish() = 0;
};

std::unique_ptr<ByteStream> make_plain_stream(int descriptor);

// Certificate chain and private key, shared by all connections. Any thread may call.
class TlsContext {
 public:
  // Error: kInvalidArgument names the file and quotes OpenSSL's message.
  static Result<std::unique_ptr<TlsContext>> load(const std::string& certificate_file,
                                                  const std::string& key_file);
  ~TlsContext();
  std::unique_ptr<ByteStream> make_stream(int descriptor) const;

 private:
  struct Parts;
  explicit TlsContext(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace fathom::http
