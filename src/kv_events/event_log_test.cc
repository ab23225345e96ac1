#include "kv_events/event_log.h"

#include <gtest/gtest.h>

#include <map>
#include <variant>

#include "kv_events/msgpack_writer.h"

namespace fathom {
namespace {

std::string hex(std::string_view bytes) {
  std::string out;
  for (const char byte : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    out += kDigits[static_cast<uint8_t>(byte) >> 4];
    out += kDigits[static_cast<uint8_t>(byte) & 15];
  }
  return out;
}

template <typename Write>
std::string packed(Write&& write) {
  std::string out;
  MsgpackWriter writer(out);
  write(writer);
  return hex(out);
}

// The bytes are those of the specification's formats.
TEST(MsgpackWriter, WritesTheShortestForm) {
  const std::pair<uint64_t, const char*> integers[] = {{0, "00"},
                                                       {127, "7f"},
                                                       {128, "cc80"},
                                                       {255, "ccff"},
                                                       {256, "cd0100"},
                                                       {65'535, "cdffff"},
                                                       {65'536, "ce00010000"},
                                                       {0xffff'ffff, "ceffffffff"},
                                                       {0x1'0000'0000, "cf0000000100000000"},
                                                       {~uint64_t{0}, "cfffffffffffffffff"}};
  for (const auto& [value, bytes] : integers) {
    const uint64_t number = value;
    EXPECT_EQ(packed([&](MsgpackWriter& writer) { writer.integer(number); }), bytes);
  }
  EXPECT_EQ(packed([](MsgpackWriter& writer) { writer.nil(); }), "c0");
  EXPECT_EQ(packed([](MsgpackWriter& writer) { writer.real(1.5); }), "cb3ff8000000000000");
  EXPECT_EQ(packed([](MsgpackWriter& writer) { writer.text("GPU"); }), "a3475055");
  EXPECT_EQ(packed([](MsgpackWriter& writer) { writer.array(15); }), "9f");
  EXPECT_EQ(packed([](MsgpackWriter& writer) { writer.array(16); }), "dc0010");
  EXPECT_EQ(packed([](MsgpackWriter& writer) { writer.array(65'536); }), "dd00010000");
}

// Reads what EventLog writes, as text: arrays in brackets.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  std::string value() {
    const uint8_t tag = byte();
    if (tag < 0x80) return std::to_string(tag);
    if (tag >= 0xa0 && tag < 0xc0) {
      std::string text(bytes_.substr(at_, tag & 31));
      at_ += tag & 31;
      return text;
    }
    if (tag >= 0x90 && tag < 0xa0) return list(tag & 15);
    switch (tag) {
      case 0xc0:
        return "nil";
      case 0xcb:
        number(8);
        return "time";
      case 0xcc:
        return std::to_string(number(1));
      case 0xcd:
        return std::to_string(number(2));
      case 0xce:
        return std::to_string(number(4));
      case 0xcf: {  // a hash: named by the order in which they come
        const auto [it, is_new] = hashes_.emplace(number(8), hashes_.size());
        return "h" + std::to_string(it->second);
      }
      case 0xdc:
        return list(number(2));
      default:
        ADD_FAILURE() << "tag " << int{tag};
        at_ = bytes_.size();
        return "";
    }
  }
  void next(std::string_view bytes) { bytes_ = bytes, at_ = 0; }

 private:
  uint8_t byte() {
    return at_ < bytes_.size() ? static_cast<uint8_t>(bytes_[at_++]) : uint8_t{0xc1};
  }
  uint64_t number(int count) {
    uint64_t value = 0;
    for (int i = 0; i < count; ++i) value = value << 8 | byte();
    return value;
  }
  std::string list(uint64_t count) {
    std::string out = "[";
    for (uint64_t i = 0; i < count; ++i) out += (i > 0 ? "," : "") + value();
    return out + "]";
  }
  std::string_view bytes_;
  size_t at_ = 0;
  std::map<uint64_t, size_t> hashes_;
};

constexpr PageKey kA{1, 2}, kB{3, 4}, kC{5, 6};
constexpr int32_t kTokens[] = {7, 300, 70'000};

TEST(EventLog, BlocksThatFollowOneAnotherAreOneEvent) {
  EventLog log(2, 3);
  EXPECT_FALSE(log.take(1).has_value());
  log.stored(kA, nullptr, kTokens);
  log.stored(kB, &kA, kTokens);
  log.stored(kC, &kA, kTokens);
  const auto batch = log.take(1);
  ASSERT_TRUE(batch);
  EXPECT_EQ(Reader(*batch).value(),
            "[time,[[BlockStored,[h0,h1],nil,[7,300,70000,7,300,70000],3,nil,GPU],"
            "[BlockStored,[h2],h0,[7,300,70000],3,nil,GPU]],2]");
  EXPECT_FALSE(log.take(1).has_value());
}

TEST(EventLog, HashesStayTheSame) {
  EventLog log(0, 3);
  Reader reader("");
  const auto next = [&] {
    const auto batch = log.take(1);
    reader.next(*batch);
    return reader.value();
  };
  log.stored(kA, nullptr, kTokens);
  log.stored(kB, &kA, kTokens);
  next();
  log.removed(kB);
  log.removed(kA);
  log.stored(kA, nullptr, kTokens);
  log.cleared();
  EXPECT_EQ(next(),
            "[time,[[BlockRemoved,[h1,h0],GPU],[BlockStored,[h0],nil,[7,300,70000],3,nil,GPU],"
            "[AllBlocksCleared]],0]");
  EventLog other(0, 3);
  other.stored(kA, nullptr, kTokens);
  const auto batch = other.take(1);
  reader.next(*batch);
  EXPECT_NE(reader.value().find("[h2]"), std::string::npos) << "another process has other hashes";
}

// A reader may then miss pages, but expects none that are not there.
TEST(EventLog, WhenTooManyWaitNothingCountsAsCached) {
  EventLog log(0, 3, 2);
  log.stored(kA, nullptr, kTokens);
  log.stored(kB, &kA, kTokens);
  log.removed(kB);
  const auto batch = log.take(1);
  EXPECT_EQ(Reader(*batch).value(), "[time,[[AllBlocksCleared],[BlockRemoved,[h0],GPU]],0]");
  EXPECT_FALSE(log.take(1).has_value());
}

}  // namespace
}  // namespace fathom
