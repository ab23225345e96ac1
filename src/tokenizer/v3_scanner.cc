#include "tokenizer/v3_scanner.h"

#include <utility>

#include "tokenizer/char_class.h"

namespace fathom {
namespace {

// Classes that end the general pattern's input: numbers and Han runs are already pieces. (It keeps
// a piece of numbers whole, and splits a Han run further: see han_run.)
constexpr uint8_t kBarrier = kNumber | kHan;

struct Char {
  uint8_t classes;
  uint8_t length;  // bytes; 0 past the end, where classes is kBarrier
};

class Scanner {
 public:
  Scanner(std::string_view text, const PieceSink& sink)
      : data_(reinterpret_cast<const uint8_t*>(text.data())), size_(text.size()), sink_(sink) {}

  void run() {
    while (position_ < size_) {
      const Char c = at(position_);
      if (c.classes & kNumber) {
        flush_unmatched(position_);
        emit(numbers_end());
      } else if (c.classes & kHan) {
        flush_unmatched(position_);
        han_run(run_end(position_ + c.length, kHan));
      } else {
        general(c);
      }
    }
    flush_unmatched(size_);
  }

 private:
  Char at(size_t i) const {
    if (i >= size_) return {kBarrier, 0};
    const uint8_t lead = data_[i];
    if (lead < 0x80) return {classes_.ascii(lead), 1};
    const auto bits = [&](size_t k) { return static_cast<char32_t>(data_[i + k] & 0x3F); };
    if (lead < 0xE0) return {classes_.of((lead & 0x1F) << 6 | bits(1)), 2};
    if (lead < 0xF0) {
      const char32_t code_point = (lead & 0x0F) << 12 | bits(1) << 6 | bits(2);
      return {in_han_ ? CharClasses::inside_han_run(code_point) : classes_.of(code_point), 3};
    }
    return {classes_.of((lead & 0x07) << 18 | bits(1) << 12 | bits(2) << 6 | bits(3)), 4};
  }

  // Applies the general pattern inside the run, which it sees as the whole text.
  void han_run(size_t end) {
    in_han_ = true;
    std::swap(size_, end);
    while (position_ < size_) general(at(position_));
    flush_unmatched(size_);
    std::swap(size_, end);
    in_han_ = false;
  }

  // The end of the run of characters with the bit, from i on.
  size_t run_end(size_t i, uint8_t bit) const {
    while (i < size_ && data_[i] < 0x80 && (classes_.ascii(data_[i]) & bit)) ++i;
    for (Char c = at(i); c.length > 0 && (c.classes & bit); c = at(i)) i += c.length;
    return i;
  }

  // \p{N}{1,3}
  size_t numbers_end() const {
    size_t i = position_;
    for (int count = 0; count < 3; ++count) {
      const Char c = at(i);
      if (c.length == 0 || !(c.classes & kNumber)) break;
      i += c.length;
    }
    return i;
  }

  // One step of the general pattern, with its alternatives in order. c is the character at
  // position_ and no barrier.
  void general(Char c) {
    const size_t next = position_ + c.length;
    if (c.classes & kLetter) return matched(run_end(next, kLetter));
    const Char d = at(next);
    if (c.classes & kPunctuation) {
      // [!-~ without letters and digits][A-Za-z]+, then [\p{P}\p{S}]+[\r\n]*
      if (c.length == 1 && (d.classes & kAsciiLetter)) return matched(ascii_letters_end(next));
      return matched(run_end(run_end(next, kPunctuation), kNewline));
    }
    // [^\r\n\p{L}\p{P}\p{S}][\p{L}\p{M}]+
    if (!(c.classes & kNewline) && (d.classes & kLetter)) return matched(run_end(next, kLetter));
    if (data_[position_] == ' ' && (d.classes & kPunctuation)) {
      return matched(run_end(run_end(next, kPunctuation), kNewline));
    }
    if (c.classes & kSpace) return matched(spaces_end());
    position_ = next;  // no alternative matches here
  }

  size_t ascii_letters_end(size_t i) const {
    while (i < size_ && data_[i] < 0x80 && (classes_.ascii(data_[i]) & kAsciiLetter)) ++i;
    return i;
  }

  // \s*[\r\n]+ up to the run's last line end, otherwise \s+(?!\S), which excludes the last
  // character, otherwise \s+.
  size_t spaces_end() const {
    size_t newline_end = 0, last = position_, i = position_;
    for (Char c = at(i); c.length > 0 && (c.classes & kSpace); c = at(i)) {
      last = i;
      i += c.length;
      if (c.classes & kNewline) newline_end = i;
    }
    if (newline_end > 0) return newline_end;
    const bool followed = !(at(i).classes & kBarrier);
    return followed && last > position_ ? last : i;
  }

  void matched(size_t end) {
    flush_unmatched(position_);
    emit(end);
  }

  void emit(size_t end) {
    sink_({reinterpret_cast<const char*>(data_) + position_, end - position_});
    position_ = piece_begin_ = end;
  }

  // Text between two matches is one piece.
  void flush_unmatched(size_t end) {
    if (end == piece_begin_) return;
    sink_({reinterpret_cast<const char*>(data_) + piece_begin_, end - piece_begin_});
    piece_begin_ = end;
  }

  const CharClasses& classes_ = CharClasses::instance();
  const uint8_t* data_;
  size_t size_;  // the run's end while in_han_
  bool in_han_ = false;
  const PieceSink& sink_;
  size_t position_ = 0;
  size_t piece_begin_ = 0;  // start of the text not yet emitted
};

}  // namespace

void scan_v3(std::string_view text, const PieceSink& sink) { Scanner(text, sink).run(); }

}  // namespace fathom
