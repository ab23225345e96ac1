// Requests from the network: what is read, and what is refused, does not depend on how the bytes
// are cut, and stays within the limits.
//
// Input: the size of a piece (0: one byte), then the bytes of a connection.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "server/http/request_reader.h"

namespace fathom::http {
namespace {

constexpr RequestReader::Limits kLimits{
    .max_header_bytes = 1024, .max_headers = 20, .max_body_bytes = 2000};

struct Outcome {
  size_t taken = 0;
  RequestReader::Stage stage = RequestReader::Stage::kHead;
  int status = 0;
  std::string message, text;
  bool operator==(const Outcome&) const = default;
};

// The first request of `bytes`, which come in pieces.
Outcome read(std::string_view bytes, size_t piece) {
  using Stage = RequestReader::Stage;
  RequestReader reader(kLimits);
  Outcome outcome;
  while (outcome.taken < bytes.size() && reader.stage() != Stage::kDone &&
         reader.stage() != Stage::kFailed) {
    const size_t taken = reader.feed(bytes.substr(outcome.taken, piece));
    FATHOM_CHECK(taken > 0 || reader.stage() == Stage::kFailed, "a piece was not taken");
    outcome.taken += taken;
    if (reader.stage() == Stage::kHeadDone) reader.read_body();
  }
  outcome.stage = reader.stage();
  if (outcome.stage == Stage::kFailed) {
    outcome.taken = 0;  // nothing is read behind a refusal
    outcome.status = reader.failure().status;
    outcome.message = reader.failure().message;
    FATHOM_CHECK(outcome.status >= 400 && !outcome.message.empty(), "a refusal without reason");
    return outcome;
  }
  const RequestHead& head = reader.head();
  FATHOM_CHECK(std::ssize(reader.body()) <= kLimits.max_body_bytes, "the body is too large");
  FATHOM_CHECK(head.headers.size() <= kLimits.max_headers, "too many fields");
  outcome.text = head.method + " " + head.target + "\n";
  for (const Headers::Field& field : head.headers) {
    FATHOM_CHECK(field.value.find_first_of(std::string_view("\r\n\0", 3)) == std::string::npos,
                 "a field's value has a line end");
    outcome.text += field.name + ": " + field.value + "\n";
  }
  outcome.text += reader.body();
  return outcome;
}

}  // namespace
}  // namespace fathom::http

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fathom::http;
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const Outcome whole = read(bytes, std::string_view::npos);
  FATHOM_CHECK(read(bytes, data[0] + 1) == whole, "pieces change what is read");
  FATHOM_CHECK(read(bytes, 1) == whole, "single bytes change what is read");
  return 0;
}
