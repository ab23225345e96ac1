#include "grammar/compiled_grammar.h"

#include <xgrammar/compiler.h>
#include <xgrammar/matcher.h>

#include <algorithm>
#include <exception>

#include "base/check.h"
#include "base/log.h"
#include "grammar/compiled_grammar_parts.h"

namespace fathom {

struct CompiledGrammar::Parts {
  xgrammar::CompiledGrammar compiled;
};

struct GrammarState::Matcher {
  // The vocabulary has no stop tokens: the engine decides when a completion may end.
  explicit Matcher(const xgrammar::CompiledGrammar& compiled)
      : matcher(compiled), vocab_size(compiled.GetTokenizerInfo().GetVocabSize()) {}

  xgrammar::GrammarMatcher matcher;
  const int32_t vocab_size;
};

CompiledGrammar::CompiledGrammar(std::shared_ptr<const Parts> parts) : parts_(std::move(parts)) {}
CompiledGrammar::~CompiledGrammar() = default;

std::unique_ptr<TokenGrammarState> CompiledGrammar::start(
    std::optional<int32_t> begins_after) const {
  return std::make_unique<GrammarState>(parts_, begins_after);
}

int64_t CompiledGrammar::memory_bytes() const {
  return static_cast<int64_t>(parts_->compiled.MemorySizeBytes());
}

std::shared_ptr<const CompiledGrammar> make_compiled_grammar(xgrammar::CompiledGrammar compiled) {
  return std::make_shared<CompiledGrammar>(
      std::make_shared<const CompiledGrammar::Parts>(CompiledGrammar::Parts{std::move(compiled)}));
}

GrammarState::GrammarState(std::shared_ptr<const CompiledGrammar::Parts> grammar,
                           std::optional<int32_t> begins_after)
    : matcher_(std::make_unique<Matcher>(grammar->compiled)),
      begins_after_(begins_after),
      has_begun_(!begins_after) {
  mask_.resize(static_cast<size_t>(xgrammar::GetBitmaskSize(matcher_->vocab_size)));
}

GrammarState::~GrammarState() = default;

void GrammarState::fill() {
  auto words = static_cast<int64_t>(mask_.size());
  DLTensor view{.data = mask_.data(),
                .device = {kDLCPU, 0},
                .ndim = 1,
                .dtype = xgrammar::GetBitmaskDLType(),
                .shape = &words,
                .strides = nullptr,
                .byte_offset = 0};
  try {
    if (!has_failed_) matcher_->matcher.FillNextTokenBitmask(&view);
  } catch (const std::exception& problem) {
    log_warning("a grammar's mask could not be computed: {}", problem.what());
    has_failed_ = true;
  }
  if (has_failed_) std::fill(mask_.begin(), mask_.end(), 0);
  // XGrammar leaves the bits beyond the vocabulary undefined.
  const int32_t vocab = matcher_->vocab_size;
  if (vocab % 32 != 0) mask_.back() &= (uint32_t{1} << vocab % 32) - 1;
  is_filled_ = true;
}

std::span<const uint32_t> GrammarState::allowed() {
  if (!has_begun_) return {};
  if (!is_filled_) fill();
  return mask_;
}

bool GrammarState::can_end() const {
  return has_begun_ && !has_failed_ && matcher_->matcher.IsCompleted();
}

bool GrammarState::accept(int32_t id) {
  if (!has_begun_) {
    has_begun_ = id == *begins_after_;
    ++num_before_;
    return true;
  }
  if (has_failed_) return false;
  try {
    if (!matcher_->matcher.AcceptToken(id)) return false;
  } catch (const std::exception& problem) {
    log_warning("a grammar could not take token {}: {}", id, problem.what());
    has_failed_ = true;
    is_filled_ = false;
    return false;
  }
  ++num_matched_;
  is_filled_ = false;
  return true;
}

void GrammarState::rollback(int64_t count) {
  FATHOM_CHECK(count >= 0 && count <= num_before_ + num_matched_, "rollback of {} from {} tokens",
               count, num_before_ + num_matched_);
  const int64_t matched = std::min(count, num_matched_);
  if (matched > 0) {
    matcher_->matcher.Rollback(static_cast<int>(matched));
    num_matched_ -= matched;
  }
  if (count > matched) {
    num_before_ -= count - matched;
    has_begun_ = false;
  }
  is_filled_ = false;
}

}  // namespace fathom
