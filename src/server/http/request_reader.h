// Makes requests of bytes, whatever way they are cut. Boost.Beast parses; this class adds what a
// server facing strangers needs: limits, and refusal of everything that two parsers could read
// differently (line ends other than CRLF, folded fields, more than one length, codings that are not
// "chunked"). Knows no sockets and no clock; fuzzed in fuzz/http_request_fuzz.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "server/http/message.h"

namespace fathom::http {

struct RequestHead {
  std::string method, target;
  int minor_version = 1;  // HTTP/1.minor_version
  Headers headers;
  bool keep_alive = true;
  bool has_body = false;          // bytes of a body follow
  bool expects_continue = false;  // and the client waits for "100 Continue" before it sends them
};

class RequestReader {
 public:
  struct Limits {
    int64_t max_header_bytes = 0, max_headers = 0, max_body_bytes = 0;
  };
  enum class Stage {
    kHead,      // feed me
    kHeadDone,  // head() is there: go on with read_body(), or refuse
    kBody,      // feed me
    kDone,      // head() and body()
    kFailed,    // failure() says with which status and why; the connection can't be used further
  };
  struct Failure {
    int status = 400;
    std::string message;
  };

  explicit RequestReader(const Limits& limits);
  ~RequestReader();

  // Takes bytes and returns how many; less than all only if the stage is now kHeadDone, kDone or
  // kFailed. Only in stages kHead and kBody.
  size_t feed(std::string_view bytes);
  void read_body();  // kHeadDone -> kBody or kDone

  Stage stage() const;
  bool started() const;  // something other than empty lines has come
  const RequestHead& head() const;
  RequestHead& head();
  std::string& body();  // so far
  const Failure& failure() const;

 private:
  class Parser;
  std::unique_ptr<Parser> parser_;
};

}  // namespace fathom::http
