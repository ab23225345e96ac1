// Incremental HTTP/1.1 request parser; input may be split anywhere.
//
// Boost.Beast parses. This class adds limits and refuses everything that two parsers could read
// differently (request smuggling): line ends other than CRLF, folded fields, more than one length,
// codings other than "chunked". Uses no sockets and no clock. Fuzzed in fuzz/http_request_fuzz.cc.
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
  bool expects_continue = false;  // the client waits for "100 Continue" before it sends the body
};

class RequestReader {
 public:
  struct Limits {
    int64_t max_header_bytes = 0, max_headers = 0, max_body_bytes = 0;
  };
  enum class Stage {
    kHead,      // needs feed()
    kHeadDone,  // head() is complete: call read_body() or refuse
    kBody,      // needs feed()
    kDone,      // head() and body() are complete
    kFailed,    // failure() has status and reason; the connection cannot be reused
  };
  struct Failure {
    int status = 400;
    std::string message;
  };

  explicit RequestReader(const Limits& limits);
  ~RequestReader();

  // Consumes bytes and returns how many. Consumes fewer than given only if the stage becomes
  // kHeadDone, kDone or kFailed. Precondition: stage kHead or kBody.
  size_t feed(std::string_view bytes);
  void read_body();  // kHeadDone -> kBody or kDone

  Stage stage() const;
  bool started() const;  // something other than empty lines was fed
  const RequestHead& head() const;
  RequestHead& head();
  std::string& body();  // received so far
  const Failure& failure() const;

 private:
  class Parser;
  std::unique_ptr<Parser> parser_;
};

}  // namespace fathom::http
