#include "grammar/xgrammar_messages.h"

#include <stdexcept>

namespace fathom {
namespace {

thread_local XGrammarWarnings* current = nullptr;

}  // namespace

XGrammarWarnings::XGrammarWarnings() { current = this; }
XGrammarWarnings::~XGrammarWarnings() { current = nullptr; }

}  // namespace fathom

// XGrammar's hooks for log messages (its support/logging.h, with XGRAMMAR_LOG_CUSTOMIZE).
namespace xgrammar {

[[noreturn]] void LogFatalImpl(const std::string& file, int line, const std::string& message);
void LogMessageImpl(const std::string& file, int line, int level, const std::string& message);

void LogFatalImpl(const std::string&, int, const std::string& message) {
  throw std::runtime_error(message);
}

void LogMessageImpl(const std::string&, int, int level, const std::string& message) {
  constexpr int kWarning = 2;
  if (level >= kWarning && fathom::current != nullptr) fathom::current->add(message);
}

}  // namespace xgrammar
