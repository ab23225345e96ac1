#include "comm/join_records.h"

#include <fmt/format.h>

#include "comm/wire.h"

namespace fathom {
namespace {

constexpr uint32_t kMaxNodes = 4096, kMaxRanks = 4096, kMaxFacts = 1000;
// Maximum bytes of a value shown in a message: enough for a flag's text, not for a file.
constexpr size_t kShown = 200;

std::string shown(const std::string* value) {
  if (value == nullptr) return "nothing";
  std::string text = value->substr(0, kShown);
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ') c = '?';  // it goes into logs
  }
  return fmt::format("'{}'{}", text, value->size() > kShown ? "…" : "");
}

const std::string* find(const std::map<std::string, std::string>& facts, const std::string& name) {
  const auto found = facts.find(name);
  return found == facts.end() ? nullptr : &found->second;
}

}  // namespace

std::vector<std::byte> encode(const NodeHello& hello) {
  WireWriter writer;
  for (const int value : {static_cast<int>(hello.protocol), hello.nnodes, hello.node_rank,
                          hello.num_ranks, hello.port, static_cast<int>(hello.facts.size())}) {
    writer.u32(static_cast<uint32_t>(value));
  }
  writer.text(hello.machine);
  for (const auto& [name, value] : hello.facts) {
    writer.text(name);
    writer.text(value);
  }
  return {writer.bytes().begin(), writer.bytes().end()};
}

Result<NodeHello> decode_hello(const ControlMessage& message) {
  WireReader reader(message.payload);
  NodeHello hello;
  hello.protocol = reader.u32();
  hello.nnodes = static_cast<int>(reader.u32());
  hello.node_rank = static_cast<int>(reader.u32());
  hello.num_ranks = static_cast<int>(reader.u32());
  hello.port = static_cast<int>(reader.u32());
  if (message.type != MessageType::kHello || reader.failed()) {
    return invalid("what came is not a node's hello");
  }
  // Another protocol may have other fields from here on.
  if (hello.protocol != kProtocol) return hello;
  const uint32_t facts = reader.u32();
  hello.machine = reader.text();
  for (uint32_t i = 0; i < facts && i < kMaxFacts && !reader.failed(); ++i) {
    std::string name = reader.text();
    hello.facts[std::move(name)] = reader.text();
  }
  if (!reader.ended() || hello.num_ranks < 1 || hello.num_ranks > static_cast<int>(kMaxRanks) ||
      hello.port < 1 || hello.port > 65535) {
    return invalid("what came is not a node's hello");
  }
  return hello;
}

std::vector<std::byte> encode(const NodeWelcome& welcome) {
  WireWriter writer;
  writer.u64(welcome.token.high);
  writer.u64(welcome.token.low);
  writer.u32(static_cast<uint32_t>(welcome.endpoints.size()));
  for (size_t node = 0; node < welcome.endpoints.size(); ++node) {
    writer.u32(static_cast<uint32_t>(welcome.ranks_of_node[node]));
    writer.u32(static_cast<uint32_t>(welcome.machine_of_node[node]));
    writer.text(welcome.endpoints[node].host);
    writer.u32(static_cast<uint32_t>(welcome.endpoints[node].port));
  }
  return {writer.bytes().begin(), writer.bytes().end()};
}

Result<NodeWelcome> decode_welcome(const ControlMessage& message) {
  if (message.type == MessageType::kRefused) {
    return invalid("{}", WireReader(message.payload).text());
  }
  WireReader reader(message.payload);
  NodeWelcome welcome;
  welcome.token.high = reader.u64();
  welcome.token.low = reader.u64();
  const uint32_t nnodes = reader.u32();
  for (uint32_t node = 0; node < nnodes && node < kMaxNodes && !reader.failed(); ++node) {
    const uint32_t ranks = reader.u32();
    if (ranks < 1 || ranks > kMaxRanks) return invalid("node 0 gave node {} {} ranks", node, ranks);
    welcome.ranks_of_node.push_back(static_cast<int>(ranks));
    welcome.machine_of_node.push_back(static_cast<int>(reader.u32()));
    std::string host = reader.text();
    welcome.endpoints.push_back({std::move(host), static_cast<int>(reader.u32())});
  }
  if (message.type != MessageType::kWelcome || !reader.ended()) {
    return invalid("node 0 answered with what is no welcome");
  }
  return welcome;
}

std::string difference(const NodeHello& theirs, const NodeHello& leaders) {
  const auto differ = [&](std::string_view what, const auto& their_value, const auto& our_value) {
    return fmt::format("node {} has {} {}, node 0 has {}", theirs.node_rank, what, their_value,
                       our_value);
  };
  if (theirs.protocol != leaders.protocol) {
    return differ("protocol", theirs.protocol, leaders.protocol);
  }
  if (theirs.nnodes != leaders.nnodes) return differ("nnodes", theirs.nnodes, leaders.nnodes);
  std::map<std::string, std::string> all = theirs.facts;
  all.insert(leaders.facts.begin(), leaders.facts.end());
  for (const auto& [name, value] : all) {
    const std::string* their_value = find(theirs.facts, name);
    const std::string* our_value = find(leaders.facts, name);
    if (their_value != nullptr && our_value != nullptr && *their_value == *our_value) continue;
    return differ(name, shown(their_value), shown(our_value));
  }
  return {};
}

}  // namespace fathom
