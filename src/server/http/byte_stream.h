// Bytes over one accepted connection, in the clear or within TLS. Nothing here blocks: a call that
// would says what to wait for. Used by the connection's I/O thread only; the descriptor is the
// caller's, must be non-blocking and open for as long.
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
  kWantRead,   // again when the descriptor is readable
  kWantWrite,  // again when it is writable
  kEnd,        // read: the other side will send no more
  kFailed,     // reset, protocol error
};

struct IoResult {
  IoStatus status = IoStatus::kFailed;
  size_t bytes = 0;  // of kDone: at least one
};

class ByteStream {
 public:
  virtual ~ByteStream() = default;
  virtual IoResult handshake() = 0;  // before anything else, until kDone
  virtual IoResult read(std::span<char> into) = 0;
  virtual IoResult write(std::span<const std::string_view> parts) = 0;  // non-empty parts
  virtual void finish() = 0;  // tells the other side that nothing more will be written
};

std::unique_ptr<ByteStream> make_plain_stream(int descriptor);

// A certificate with its key, for all connections. Any thread.
class TlsContext {
 public:
  // kInvalidArgument, naming the file and what OpenSSL says about it.
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
