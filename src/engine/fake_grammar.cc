#include "engine/fake_grammar.h"

#include "base/check.h"
#include "base/random.h"
#include "engine/fake_tokenizer.h"

namespace fathom {
namespace {

constexpr int32_t kOpenLength = 5, kClosedLength = 9, kDeadLength = 12;

class FakeGrammarState : public TokenGrammarState {
 public:
  FakeGrammarState(int32_t kind, std::optional<int32_t> begins_after)
      : kind_(kind), begins_after_(begins_after) {}

  std::span<const uint32_t> allowed() override {
    const size_t begin = begin_of_match();
    if (begin > ids_.size()) return {};
    mask_.assign(10, 0);
    if (must_stop()) return mask_;
    uint64_t hash = static_cast<uint64_t>(kind_);
    for (size_t i = begin; i < ids_.size(); ++i) {
      hash = mix64(hash ^ static_cast<uint64_t>(ids_[i] + 1));
    }
    static const std::vector<int32_t> likely = fake_likely_ids();
    const bool is_forced = kind_ == 2 && hash % 4 != 0;
    for (size_t i = 0; i < likely.size(); ++i) {
      const bool allows = is_forced ? i == hash % (likely.size() - 1) : (hash >> i % 48) % 3 != 0;
      if (allows && likely[i] != kFakeEos) set(likely[i]);
    }
    set('a' + static_cast<int32_t>(hash % 3));
    return mask_;
  }

  bool can_end() const override {
    const size_t begin = begin_of_match();
    if (begin > ids_.size()) return false;
    const size_t length = ids_.size() - begin;
    return kind_ == 0 || (kind_ == 1 && length >= kOpenLength);
  }

  bool accept(int32_t id) override {
    const std::span<const uint32_t> words = allowed();
    const auto word = static_cast<size_t>(id / 32);
    if (!words.empty() && (word >= words.size() || (words[word] >> id % 32 & 1) == 0)) return false;
    ids_.push_back(id);
    return true;
  }

  void rollback(int64_t count) override {
    FATHOM_CHECK(count >= 0 && count <= static_cast<int64_t>(ids_.size()), "{} of {}", count,
                 ids_.size());
    ids_.resize(ids_.size() - static_cast<size_t>(count));
  }

 private:
  // Beyond the last id: it has not begun.
  size_t begin_of_match() const {
    if (!begins_after_) return 0;
    for (size_t i = 0; i < ids_.size(); ++i) {
      if (ids_[i] == *begins_after_) return i + 1;
    }
    return ids_.size() + 1;
  }
  bool must_stop() const {
    const size_t length = ids_.size() - begin_of_match();
    return (kind_ == 1 && length >= kClosedLength) || (kind_ == 3 && length >= kDeadLength);
  }
  void set(int32_t id) { mask_[static_cast<size_t>(id / 32)] |= uint32_t{1} << id % 32; }

  const int32_t kind_;
  const std::optional<int32_t> begins_after_;
  std::vector<int32_t> ids_;
  std::vector<uint32_t> mask_;
};

class FakeGrammar : public TokenGrammar {
 public:
  explicit FakeGrammar(int32_t kind) : kind_(kind) {}
  std::unique_ptr<TokenGrammarState> start(std::optional<int32_t> begins_after) const override {
    return std::make_unique<FakeGrammarState>(kind_, begins_after);
  }

 private:
  const int32_t kind_;
};

}  // namespace

std::shared_ptr<const TokenGrammar> fake_grammar(int32_t kind) {
  return std::make_shared<FakeGrammar>(kind);
}

}  // namespace fathom
