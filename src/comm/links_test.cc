// What a connection may bring: the other end is played by hand.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/contains.h"
#include "comm/control_channel.h"
#include "comm/group.h"
#include "comm/peer_links.h"
#include "comm/wire.h"

namespace fathom {
namespace {

struct SocketPair {
  SocketPair() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
    ours = Fd(ends[0]);
    theirs = Fd(ends[1]);
  }
  Fd ours, theirs;
};

void write_all(const Fd& fd, std::span<const std::byte> bytes) {
  ASSERT_EQ(write(fd.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
}

// A message as it stands on the wire.
std::vector<std::byte> on_the_wire(uint32_t magic, uint32_t type, uint32_t bytes,
                                   std::span<const std::byte> payload = {}) {
  WireWriter writer;
  writer.u32(magic);
  writer.u32(type);
  writer.u32(bytes);
  std::vector<std::byte> all(writer.bytes().begin(), writer.bytes().end());
  all.insert(all.end(), payload.begin(), payload.end());
  return all;
}
constexpr uint32_t kMagic = 0x4C43'4146;

// Node 0's channel to node 1, which this test plays.
struct Channel {
  explicit Channel(HeartbeatOptions options = {.silence = std::chrono::minutes(5)}) {
    std::map<int, FramedConnection> connections;
    connections.emplace(1, FramedConnection(std::move(pair.ours)));
    channel.emplace(WorldLayout{0, {1, 1}}, std::move(connections), abort_word, options);
  }
  // Why the process aborts.
  std::string reason() {
    while (!abort_word.aborted()) std::this_thread::yield();
    EXPECT_EQ(abort_word.reason().rank, 1);
    return abort_word.reason().status.message;
  }

  SocketPair pair;
  AbortWord abort_word;
  std::optional<ControlChannel> channel;
};

TEST(ControlChannel, WhatIsNoMessageEndsTheWorld) {
  const std::vector<std::byte> letters(3, std::byte{'x'});
  const std::vector<std::pair<std::vector<std::byte>, std::string>> cases = {
      {letters, "what came is no message of this protocol"},
      {on_the_wire(kMagic, 99, 0), "it sent a message of type 99"},
      {on_the_wire(kMagic, static_cast<uint32_t>(MessageType::kHello), 0),
       "it sent a message of type 1"},
      {on_the_wire(kMagic, static_cast<uint32_t>(MessageType::kAbort), 3, letters),
       "it sent an abort that cannot be read"},
      {on_the_wire(kMagic, static_cast<uint32_t>(MessageType::kMessage), (64 << 20) + 1),
       "a message of 67108865 bytes is longer than 67108864"},
  };
  for (const auto& [bytes, message] : cases) {
    Channel channel;
    write_all(channel.pair.theirs, bytes);
    EXPECT_EQ(channel.reason(), "node 1 (rank 1): " + message);
    EXPECT_THROW(channel.channel->receive(1), CommError);
    EXPECT_THROW(channel.channel->send(1, {}), CommError);
    channel.pair.theirs = Fd();  // nobody would read the farewell
  }
}

TEST(ControlChannel, ANodeThatEndsOrIsSilentEndsTheWorld) {
  Channel closed;
  write_all(closed.pair.theirs,
            on_the_wire(kMagic, static_cast<uint32_t>(MessageType::kHeartbeat), 0));
  closed.pair.theirs = Fd();
  EXPECT_EQ(closed.reason(), "node 1 (rank 1): it ended without a goodbye");

  Channel silent({.silence = std::chrono::milliseconds(50)});
  EXPECT_EQ(silent.reason(), "node 1 (rank 1): no heartbeat for 0.05 s");
  silent.pair.theirs = Fd();
}

TEST(ControlChannel, MessagesBeforeAGoodbyeArrive) {
  Channel channel;
  const std::vector<std::byte> text(5, std::byte{7});
  const auto message = on_the_wire(kMagic, static_cast<uint32_t>(MessageType::kMessage), 5, text);
  // In two pieces.
  write_all(channel.pair.theirs, std::span(message).first(13));
  write_all(channel.pair.theirs, std::span(message).subspan(13));
  write_all(channel.pair.theirs,
            on_the_wire(kMagic, static_cast<uint32_t>(MessageType::kGoodbye), 0));
  channel.pair.theirs = Fd();
  EXPECT_EQ(channel.channel->receive(1), text);
  EXPECT_EQ(channel.channel->receive(1), std::nullopt);
  EXPECT_FALSE(channel.abort_word.aborted());
}

// Rank 0 of a group whose rank 1 this test plays; it gives 8 bytes in an all_reduce.
std::string error_of_meeting(std::span<const std::byte> from_peer) {
  SocketPair pair;
  AbortWord abort_word;
  const auto links = std::make_shared<PeerLinks>(abort_word, false);
  links->add(1, std::move(pair.ours));
  Group group(0, std::make_shared<MeetingBoard>(1, abort_word), {0, -1}, {links, 77}, abort_word,
              {.world_ranks = {0, 1}});
  write_all(pair.theirs, from_peer);
  shutdown(pair.theirs.get(), SHUT_WR);
  const std::byte given[8] = {};
  try {
    group.meet(Collective::kAllReduce, given);
  } catch (const CommError& failure) {
    EXPECT_TRUE(abort_word.aborted());
    return failure.what();
  }
  return "";
}

TEST(PeerLinks, WhatIsNoFrameIsRefused) {
  // What rank 0 itself sends is what it expects: a frame of the right group.
  FrameHeader right;
  {
    SocketPair pair;
    AbortWord abort_word;
    const auto links = std::make_shared<PeerLinks>(abort_word, false);
    links->add(1, std::move(pair.ours));
    GroupOptions options{.world_ranks = {0, 1}};
    options.limit = std::chrono::milliseconds(1);
    Group group(0, std::make_shared<MeetingBoard>(1, abort_word), {0, -1}, {links, 77}, abort_word,
                options);
    const std::byte given[8] = {};
    EXPECT_THROW(group.meet(Collective::kAllReduce, given), CommError);
    ASSERT_EQ(read(pair.theirs.get(), &right, sizeof right), static_cast<ssize_t>(sizeof right));
  }
  const auto with_payload = [](const FrameHeader& header, size_t payload) {
    std::vector<std::byte> bytes(sizeof header + payload);
    std::memcpy(bytes.data(), &header, sizeof header);
    return bytes;
  };
  EXPECT_EQ(error_of_meeting(with_payload(right, 8)), "");

  const std::string no_frame =
      "rank 1 sent what is no frame of this world while rank 0 was in "
      "all_reduce #1 (8 bytes)";
  FrameHeader header = right;
  header.magic ^= 1;
  EXPECT_EQ(error_of_meeting(with_payload(header, 8)), no_frame);
  header = right;
  header.epoch = 78;
  EXPECT_EQ(error_of_meeting(with_payload(header, 8)), no_frame);
  header = right;
  header.kind = kNumCollectives;
  EXPECT_EQ(error_of_meeting(with_payload(header, 8)), no_frame);
  header = right;
  header.bytes = header.total_bytes = uint64_t{1} << 60;
  EXPECT_EQ(error_of_meeting(with_payload(header, 8)), no_frame);
  header = right;
  header.number = 2;
  EXPECT_EQ(error_of_meeting(with_payload(header, 8)),
            "rank 1 is in all_reduce #2 (8 bytes), this rank 0 in all_reduce #1 (8 bytes)");
  // Cut within the header and within the bytes.
  const std::vector<std::byte> whole = with_payload(right, 8);
  for (const size_t size : {size_t{0}, size_t{10}, sizeof header, sizeof header + 7}) {
    EXPECT_TRUE(contains(error_of_meeting(std::span(whole).first(size)),
                         "rank 1 closed its connection while rank 0 was in all_reduce #1"))
        << size;
  }
}

}  // namespace
}  // namespace fathom
