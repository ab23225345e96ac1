#include "transfer/tcp/records.h"

#include <algorithm>
#include <cstring>

#include "base/math.h"
#include "cache/latent_layout.h"
#include "comm/wire.h"

namespace fathom {
namespace {

Frame frame_of(FrameType type, std::span<const std::byte> payload = {}) {
  Frame frame(kFrameHeaderBytes + payload.size());
  write_frame_header({type, payload.size()}, std::span(frame).first<kFrameHeaderBytes>());
  if (!payload.empty()) {
    std::memcpy(frame.data() + kFrameHeaderBytes, payload.data(), payload.size());
  }
  return frame;
}

Frame frame_of(FrameType type, const WireWriter& writer) { return frame_of(type, writer.bytes()); }

std::string_view cut(std::string_view text, size_t most) { return text.substr(0, most); }

void write_id(const TicketId& id, WireWriter& writer) {
  writer.u64(id.engine);
  writer.u64(id.epoch);
  writer.u64(id.number);
}

TicketId read_id(WireReader& reader) {
  TicketId id;
  id.engine = reader.u64();
  id.epoch = reader.u64();
  id.number = reader.u64();
  return id;
}

Frame ticket_frame(FrameType type, const TicketId& id) {
  WireWriter writer;
  write_id(id, writer);
  return frame_of(type, writer);
}

template <size_t N>
Result<std::array<std::byte, N>> read_fixed(Payload payload, std::string_view what) {
  if (payload.size() != N) {
    return invalid("a {} has {} bytes, must have {}", what, payload.size(), N);
  }
  std::array<std::byte, N> bytes;
  std::copy(payload.begin(), payload.end(), bytes.begin());
  return bytes;
}

tl::unexpected<Status> malformed(std::string_view what, Payload payload) {
  return invalid("a {} of {} bytes is malformed", what, payload.size());
}

}  // namespace

Frame hello_frame(const Hello& hello) {
  WireWriter writer;
  writer.u32(hello.protocol);
  writer.u32(static_cast<uint32_t>(hello.kind));
  writer.u64(hello.session);
  Frame payload(writer.bytes().begin(), writer.bytes().end());
  payload.insert(payload.end(), hello.nonce.begin(), hello.nonce.end());
  return frame_of(FrameType::kHello, payload);
}

Frame challenge_frame(const Nonce& nonce) { return frame_of(FrameType::kChallenge, nonce); }

Frame proof_frame(const Proof& proof) { return frame_of(FrameType::kProof, proof); }

Frame refused_frame(std::string_view why) {
  return frame_of(FrameType::kRefused, std::as_bytes(std::span(cut(why, kMaxSentenceBytes))));
}

Frame facts_frame(const Facts& facts) {
  WireWriter writer;
  writer.u64(facts.size());
  for (const auto& [name, value] : facts) {
    writer.text(name);
    writer.text(value);
  }
  return frame_of(FrameType::kFacts, writer);
}

Frame welcome_frame(const Welcome& welcome) {
  WireWriter writer;
  writer.u64(welcome.session);
  writer.u64(welcome.engine);
  writer.text({reinterpret_cast<const char*>(welcome.lane.data()), welcome.lane.size()});
  return frame_of(FrameType::kWelcome, writer);
}

Frame lane_frame(std::span<const std::byte> address) { return frame_of(FrameType::kLane, address); }

Frame order_frame(const PromptOrder& order) {
  const Ticket& ticket = order.ticket;
  WireWriter writer;
  write_id(ticket.id, writer);
  writer.u64(ticket.request);
  writer.i64(ticket.first_page);
  writer.i64(ticket.num_pages);
  writer.i64(ticket.page_bytes);
  writer.u64(ticket.form);
  writer.u64(ticket.digest_seed);
  writer.i32(order.priority);
  writer.text(order.cache_salt);
  writer.array(std::span<const int32_t>(order.tokens));
  return frame_of(FrameType::kOrder, writer);
}

Frame cancel_frame(const TicketId& id) { return ticket_frame(FrameType::kCancel, id); }
Frame done_frame(const TicketId& id) { return ticket_frame(FrameType::kDone, id); }

Frame failed_frame(const FailedOrder& failed) {
  WireWriter writer;
  write_id(failed.ticket, writer);
  writer.u32(static_cast<uint32_t>(failed.why.code));
  writer.text(cut(failed.why.message, kMaxSentenceBytes));
  return frame_of(FrameType::kFailed, writer);
}

Frame heartbeat_frame() { return frame_of(FrameType::kHeartbeat); }

Result<Hello> read_hello(Payload payload) {
  if (payload.size() != kHelloBytes) return malformed("hello", payload);
  WireReader reader(payload);
  Hello hello;
  hello.protocol = reader.u32();
  const uint32_t kind = reader.u32();
  hello.session = reader.u64();
  const auto nonce = payload.last(std::tuple_size_v<Nonce>);
  std::copy(nonce.begin(), nonce.end(), hello.nonce.begin());
  if (kind > static_cast<uint32_t>(StreamKind::kData)) {
    return invalid("a connection of kind {}, known are 0 and 1", kind);
  }
  hello.kind = static_cast<StreamKind>(kind);
  return hello;
}

Result<Nonce> read_challenge(Payload payload) {
  return read_fixed<std::tuple_size_v<Nonce>>(payload, "challenge");
}

Result<Proof> read_proof(Payload payload) {
  return read_fixed<std::tuple_size_v<Proof>>(payload, "proof");
}

Result<std::string> read_refused(Payload payload) {
  if (payload.size() > kMaxSentenceBytes) return malformed("refusal", payload);
  std::string why(payload.size(), '\0');
  if (!payload.empty()) std::memcpy(why.data(), payload.data(), payload.size());
  return why;
}

Result<Facts> read_facts(Payload payload) {
  WireReader reader(payload);
  const size_t count = reader.count(2 * sizeof(uint32_t));
  if (count > kMaxFacts) return invalid("{} facts, at most {}", count, kMaxFacts);
  Facts facts(count);
  for (auto& [name, value] : facts) {
    name = reader.text();
    value = reader.text();
  }
  if (!reader.ended()) return malformed("list of facts", payload);
  return facts;
}

Result<Welcome> read_welcome(Payload payload) {
  WireReader reader(payload);
  Welcome welcome;
  welcome.session = reader.u64();
  welcome.engine = reader.u64();
  const std::string lane = reader.text();
  if (!reader.ended() || lane.size() > kMaxLaneAddressBytes) return malformed("welcome", payload);
  const auto bytes = std::as_bytes(std::span(lane));
  welcome.lane.assign(bytes.begin(), bytes.end());
  return welcome;
}

Result<PromptOrder> read_order(Payload payload) {
  WireReader reader(payload);
  PromptOrder order;
  Ticket& ticket = order.ticket;
  ticket.id = read_id(reader);
  ticket.request = reader.u64();
  ticket.first_page = reader.i64();
  ticket.num_pages = reader.i64();
  ticket.page_bytes = reader.i64();
  ticket.form = reader.u64();
  ticket.digest_seed = reader.u64();
  order.priority = reader.i32();
  order.cache_salt = reader.text();
  reader.array(order.tokens);
  if (!reader.ended()) return malformed("order", payload);
  if (order.cache_salt.size() > kMaxSaltBytes) {
    return invalid("an order's salt has {} bytes, at most {}", order.cache_salt.size(),
                   kMaxSaltBytes);
  }
  const int64_t pages = ceil_div(std::ssize(order.tokens), kPageSize);
  if (ticket.first_page < 0 || ticket.num_pages < 1 || ticket.first_page >= pages ||
      ticket.num_pages != pages - ticket.first_page) {
    return invalid("a ticket for {} pages from {} on, its {} tokens have {}", ticket.num_pages,
                   ticket.first_page, order.tokens.size(), pages);
  }
  return order;
}

Result<TicketId> read_ticket_id(Payload payload) {
  WireReader reader(payload);
  const TicketId id = read_id(reader);
  if (!reader.ended()) return malformed("ticket", payload);
  return id;
}

Result<FailedOrder> read_failed(Payload payload) {
  WireReader reader(payload);
  FailedOrder failed;
  failed.ticket = read_id(reader);
  const uint32_t code = reader.u32();
  failed.why.message = reader.text();
  if (!reader.ended() || failed.why.message.size() > kMaxSentenceBytes) {
    return malformed("failure", payload);
  }
  if (code > static_cast<uint32_t>(Code::kUnavailable)) {
    return invalid("a failure has code {}, the largest is {}", code,
                   static_cast<uint32_t>(Code::kUnavailable));
  }
  failed.why.code = static_cast<Code>(code);
  return failed;
}

}  // namespace fathom
