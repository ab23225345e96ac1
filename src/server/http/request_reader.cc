#include "server/http/request_reader.h"

#include <algorithm>
#include <boost/beast/http/basic_parser.hpp>
#include <boost/beast/http/error.hpp>
#include <limits>
#include <utility>

#include "base/check.h"

namespace fathom::http {
namespace {

namespace beast_http = boost::beast::http;
using boost::beast::error_code;
using boost::beast::string_view;

// Limits in bytes of all chunk extensions together and of the trailer. Few clients send either, and
// both are dropped.
constexpr int64_t kMaxChunkExtensions = 4 << 10;
constexpr int64_t kMaxTrailer = 4 << 10;
// Limit of hex digits in a chunk size: two for each byte of 64 bits.
constexpr int64_t kMaxHexDigits = 16;

// Fields that are ambiguous if they occur twice.
constexpr std::string_view kOnceOnly[] = {"Authorization",    "X-Api-Key",   "Content-Type",
                                          "Content-Encoding", "Origin",      "Sec-Fetch-Site",
                                          "Content-Length",   "X-Request-Id"};

std::string to_string(string_view text) { return {text.data(), text.size()}; }

bool is_token_char(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
         std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
}

bool all_digits(std::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool is_hex_digit(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

// Checks byte `at` of header lines, given the bytes before it. Returns what is wrong, or null.
const char* fault_at(std::string_view text, size_t at) {
  const auto c = static_cast<unsigned char>(text[at]);
  const char before = at > 0 ? text[at - 1] : '\0';
  if ((before == '\r') != (c == '\n')) return "a line that does not end in CR LF";
  if (before == '\n' && (c == ' ' || c == '\t')) return "a folded header field";
  if ((c < 0x20 && c != '\r' && c != '\n' && c != '\t') || c == 0x7F) return "a control character";
  return nullptr;
}

}  // namespace

class RequestReader::Parser : public beast_http::basic_parser<true> {
 public:
  explicit Parser(const Limits& limits) : limits_(limits) {
    // Disables the parser's own limits: ours have messages that name them.
    header_limit(static_cast<uint32_t>(limits.max_header_bytes));
    body_limit(std::numeric_limits<uint64_t>::max());
    eager(true);
  }

  size_t feed(std::string_view bytes) {
    FATHOM_CHECK(stage == Stage::kHead || stage == Stage::kBody, "fed in another stage");
    return stage == Stage::kHead ? feed_head(bytes) : feed_body(bytes);
  }

  void read_body() {
    FATHOM_CHECK(stage == Stage::kHeadDone, "there is no head to go on from");
    stage = head.has_body ? Stage::kBody : Stage::kDone;
  }

  bool started() const { return stage != Stage::kHead || !text_.empty(); }

  Stage stage = Stage::kHead;
  RequestHead head;
  std::string body;
  Failure failure;

 private:
  size_t feed_head(std::string_view bytes);
  void parse_head();
  void check_head();
  size_t feed_body(std::string_view bytes);
  int64_t digits_before(const char* end) const;
  void check_chunk_line(int64_t digits, int64_t extension_bytes);
  void check_trailer(const char* begin);
  void check_trailer_size(int64_t bytes);
  void check_pending();

  void fail(int status, std::string message) {
    stage = Stage::kFailed;
    failure = {status, std::move(message)};
  }
  void fail_body_too_large() {
    fail(413, fmt::format("the request's body is larger than the limit of {} bytes",
                          limits_.max_body_bytes));
  }

  void on_request_impl(beast_http::verb, string_view method, string_view target, int version,
                       error_code&) override {
    head.method = to_string(method);
    head.target = to_string(target);
    head.minor_version = version - 10;
  }
  void on_field_impl(beast_http::field, string_view name, string_view value,
                     error_code& ec) override {
    if (++fields_ > limits_.max_headers) {
      fail(431, fmt::format("the request has more than {} header fields", limits_.max_headers));
      ec = beast_http::error::header_limit;
    } else if (stage == Stage::kHead) {  // fields of a trailer are counted and dropped
      head.headers.add(to_string(name), to_string(value));
    }
  }
  void on_header_impl(error_code&) override {}
  // Called with the body's first bytes. Reserving avoids copies of a large body while it grows;
  // reserved pages that never arrive stay untouched.
  void on_body_init_impl(const boost::optional<uint64_t>& length, error_code&) override {
    if (length) body.reserve(static_cast<size_t>(*length));  // within the limit: check_head()
  }
  size_t on_body_impl(string_view bytes, error_code&) override {
    body.append(bytes.data(), bytes.size());
    return bytes.size();
  }
  void on_chunk_header_impl(uint64_t size, string_view extensions, error_code& ec) override {
    check_chunk_line(digits_before(extensions.data()), static_cast<int64_t>(extensions.size()));
    extension_bytes_ += static_cast<int64_t>(extensions.size());
    if (stage == Stage::kFailed) {
      // errors of the chunk's line come first
    } else if (size > static_cast<uint64_t>(limits_.max_body_bytes - std::ssize(body))) {
      fail_body_too_large();
    } else if (size == 0) {
      check_trailer(extensions.data() + extensions.size() + 2);
    }
    if (stage == Stage::kFailed) ec = beast_http::error::bad_chunk_extension;
  }
  size_t on_chunk_body_impl(uint64_t, string_view bytes, error_code&) override {
    body.append(bytes.data(), bytes.size());
    return bytes.size();
  }
  void on_finish_impl(error_code&) override {}
  // Required by Beast; never called for a request.
  void on_response_impl(int, string_view, int, error_code&) override {}

  const Limits limits_;
  std::string text_;        // kHead: the head so far; kBody: input that the parser has not consumed
  std::string_view input_;  // kBody: input being parsed
  int64_t fields_ = 0;
  int64_t extension_bytes_ = 0;
};

// Collects the complete head, because the checks need bytes that the parser does not report.
size_t RequestReader::Parser::feed_head(std::string_view bytes) {
  size_t taken = 0;
  if (text_.empty()) {
    // Some clients end a body with an extra empty line.
    taken = std::min(bytes.find_first_not_of("\r\n"), bytes.size());
    if (taken < bytes.size() && !is_token_char(bytes[taken])) {
      fail(400, "this is no HTTP request: a method was expected");
      return taken;
    }
  }
  for (; taken < bytes.size(); ++taken) {
    if (std::ssize(text_) == limits_.max_header_bytes) {
      const bool in_request_line = text_.find('\n') == std::string::npos;
      fail(in_request_line ? 414 : 431,
           fmt::format("the request {} longer than the limit of {} bytes",
                       in_request_line ? "line is" : "line and header fields are",
                       limits_.max_header_bytes));
      return taken;
    }
    text_.push_back(bytes[taken]);
    if (const char* fault = fault_at(text_, text_.size() - 1)) {
      fail(400, fmt::format("malformed request: {}", fault));
      return taken + 1;
    }
    if (text_.back() == '\n' && text_.ends_with("\r\n\r\n")) {
      parse_head();
      text_.clear();
      return taken + 1;
    }
  }
  return taken;
}

void RequestReader::Parser::parse_head() {
  error_code ec;
  eager(false);  // stop after the head
  put(boost::asio::buffer(text_), ec);
  eager(true);
  if (stage == Stage::kFailed) return;
  if (ec == beast_http::error::bad_version) {
    return fail(505, "this server speaks version 1.1 of HTTP, and 1.0");
  }
  if (ec) return fail(400, fmt::format("malformed request: {}", ec.message()));
  if (!is_header_done()) return fail(400, "malformed request: incomplete head");
  check_head();
}

void RequestReader::Parser::check_head() {
  for (const std::string_view name : kOnceOnly) {
    if (head.headers.count(name) > 1) {
      return fail(400, fmt::format("malformed request: more than one {}", name));
    }
  }
  const int64_t lengths = head.headers.count("Content-Length");
  const std::string* coding = head.headers.find("Transfer-Encoding");
  if (lengths == 1 && !all_digits(*head.headers.find("Content-Length"))) {
    return fail(400, "malformed request: Content-Length is not a number");
  }
  if (coding != nullptr) {
    if (lengths > 0 || head.minor_version == 0) {
      return fail(400, "malformed request: Transfer-Encoding with Content-Length or in HTTP/1.0");
    }
    if (!equal_ignoring_case(*coding, "chunked") || !chunked()) {
      return fail(501, "the only Transfer-Encoding that this server reads is 'chunked'");
    }
  }
  const int64_t hosts = head.headers.count("Host");
  if (hosts > 1 || (hosts == 0 && head.minor_version == 1)) {
    return fail(400, "malformed request: there must be one Host field");
  }
  if (const auto length = content_length();
      length && *length > static_cast<uint64_t>(limits_.max_body_bytes)) {
    return fail_body_too_large();
  }
  head.keep_alive = head.minor_version == 1 && keep_alive();
  head.has_body = !is_done();
  const std::string* expect = head.headers.find("Expect");
  if (expect != nullptr && head.minor_version == 1) {
    if (!equal_ignoring_case(*expect, "100-continue")) {
      return fail(417, "the only Expect that this server knows is '100-continue'");
    }
    head.expects_continue = head.has_body;
  }
  stage = Stage::kHeadDone;
}

size_t RequestReader::Parser::feed_body(std::string_view bytes) {
  // Unconsumed bytes must be passed again, together with those that follow.
  const size_t kept = text_.size();
  std::string joined;
  if (kept > 0) {
    joined = std::exchange(text_, {});
    joined.append(bytes);
  }
  const std::string_view input = kept > 0 ? std::string_view(joined) : bytes;
  input_ = input;
  size_t taken = 0;
  error_code ec;
  // put() returns after each incomplete chunk header, and when it has no input.
  while (taken < input.size() && !is_done() && !ec) {
    taken += put(boost::asio::buffer(input.data() + taken, input.size() - taken), ec);
  }
  if (stage == Stage::kFailed) return bytes.size();
  if (ec && ec != beast_http::error::need_more) {
    fail(400, fmt::format("malformed body: {}", ec.message()));
    return bytes.size();
  }
  if (is_done()) {
    stage = Stage::kDone;
    FATHOM_CHECK(taken >= kept, "a request ended in bytes that had come before");
    return taken - kept;
  }
  text_.assign(input.substr(taken));
  check_pending();
  return bytes.size();
}

// Checks the trailer's bytes: the parser drops its fields, but joins folded ones first. `begin`
// points to the complete trailer, which ends in an empty line.
void RequestReader::Parser::check_trailer(const char* begin) {
  const std::string_view rest(begin, static_cast<size_t>(input_.data() + input_.size() - begin));
  const size_t end = rest.starts_with("\r\n") ? 0 : rest.find("\r\n\r\n") + 2;
  check_trailer_size(static_cast<int64_t>(end));
  for (size_t at = 0; at < end && stage != Stage::kFailed; ++at) {
    if (const char* fault = fault_at(rest, at)) {
      fail(400, fmt::format("malformed body: {} in the trailer", fault));
    }
  }
}

void RequestReader::Parser::check_trailer_size(int64_t bytes) {
  if (bytes <= kMaxTrailer) return;
  fail(400, fmt::format("malformed body: a trailer of more than {} bytes", kMaxTrailer));
}

void RequestReader::Parser::check_chunk_line(int64_t digits, int64_t extension_bytes) {
  if (digits > kMaxHexDigits) {
    fail(400, fmt::format("malformed body: a chunk's size of more than {} digits", kMaxHexDigits));
  } else if (extension_bytes_ + extension_bytes > kMaxChunkExtensions) {
    fail(400, fmt::format("malformed body: chunk extensions of more than {} bytes",
                          kMaxChunkExtensions));
  }
}

int64_t RequestReader::Parser::digits_before(const char* end) const {
  const char* begin = end;
  while (begin > input_.data() && is_hex_digit(begin[-1])) --begin;
  return end - begin;
}

// Checks an incomplete chunk line or trailer; fails if no further input can make it valid.
void RequestReader::Parser::check_pending() {
  const std::string_view text = text_;
  const size_t begin = text.starts_with("\r\n") ? 2 : 0;
  const size_t line_end = text.find("\r\n", begin);
  if (line_end != std::string_view::npos) {
    // Counts everything but the last two line ends, of which one byte is missing.
    check_trailer_size(std::ssize(text) - static_cast<int64_t>(line_end) - 3);
    return;
  }
  size_t digits_end = begin;
  while (digits_end < text.size() && is_hex_digit(text[digits_end])) ++digits_end;
  const int64_t behind = std::ssize(text) - static_cast<int64_t>(digits_end);
  check_chunk_line(static_cast<int64_t>(digits_end - begin), std::max<int64_t>(behind - 1, 0));
}

RequestReader::RequestReader(const Limits& limits) : parser_(std::make_unique<Parser>(limits)) {}
RequestReader::~RequestReader() = default;

size_t RequestReader::feed(std::string_view bytes) { return parser_->feed(bytes); }
void RequestReader::read_body() { parser_->read_body(); }
RequestReader::Stage RequestReader::stage() const { return parser_->stage; }
bool RequestReader::started() const { return parser_->started(); }
const RequestHead& RequestReader::head() const { return parser_->head; }
RequestHead& RequestReader::head() { return parser_->head; }
std::string& RequestReader::body() { return parser_->body; }
const RequestReader::Failure& RequestReader::failure() const { return parser_->failure; }

}  // namespace fathom::http
