#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/version.h"
#include "cli/command_text.h"

namespace fathom {
namespace {

// Escapes text for troff: '\' and '-' are literal, and no line begins with a request.
std::string troff(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (escaped.empty() && (c == '.' || c == '\'')) escaped += "\\&";
    if (c == '\\') {
      escaped += "\\e";
    } else if (c == '-') {
      escaped += "\\-";
    } else if (c == '\n') {
      escaped += ' ';
    } else {
      escaped += c;
    }
  }
  return escaped;
}

std::string flag_entry(const FlagText& flag) {
  std::vector<std::string> names;
  for (const std::string& name : flag.names) names.push_back("\\fB" + troff(name) + "\\fR");
  std::string text = fmt::format(".TP\n{}", fmt::join(names, ", "));
  if (!flag.kind.empty()) text += " \\fI" + troff(flag.kind) + "\\fR";
  text += "\n" + troff(flag.help);
  if (!flag.fallback.empty()) text += troff(" (default: " + flag.fallback + ")");
  constexpr const char* kRepeats = "may be given several times";
  if (flag.repeats && flag.help.find(kRepeats) == std::string::npos) {
    text += fmt::format("; {}", kRepeats);
  }
  if (!flag.variable.empty()) text += "\n[\\fB" + troff(flag.variable) + "\\fR]";
  return text + "\n";
}

std::string command_entry(const CommandText& command) {
  std::string text = fmt::format(".SS \"fathom {}\"\n", troff(command.path));
  text += fmt::format("\\fBfathom {}\\fR [\\fIflags\\fR]", troff(command.path));
  for (const std::string& word : command.words) text += " [\\fI" + troff(word) + "\\fR]";
  text += "\n.PP\n" + troff(command.help) + ".\n";
  if (!command.footer.empty()) text += ".PP\n" + troff(command.footer) + "\n";
  std::string heading;
  for (const FlagText& flag : command.flags) {
    if (flag.heading != heading) {
      heading = flag.heading;
      text += fmt::format(".PP\n\\fI{}\\fR\n", troff(heading));
    }
    text += flag_entry(flag);
  }
  return text;
}

constexpr const char* kEnd =
    ".SH ENVIRONMENT\n"
    "Every flag has the variable that stands behind it in brackets; the command line wins over\n"
    "it. \\fBHF_HUB_CACHE\\fR, \\fBHF_HOME\\fR and \\fBXDG_CACHE_HOME\\fR say where the hub cache "
    "is.\n"
    "\\fBFATHOM_CPU_ISA\\fR (scalar, avx2, avx512, amx) lowers the instruction set.\n"
    "\\fBFATHOM_CUBLASLT\\fR names the cuBLASLt to load. \\fBNO_COLOR\\fR turns colours off.\n"
    ".SH FILES\n"
    ".TP\n\\fI/etc/fathom/config.yaml\\fR\nFlags of the service that systemd starts\n"
    ".TP\n\\fI/usr/share/fathom/models/fathom\\-tiny\\fR\nThe bundled model\n"
    ".SH EXIT STATUS\n"
    "0: done. 1: failed. 2: bad flags or model files. 3: the server's engine was stuck.\n"
    "130: stopped by Ctrl\\-C or a second signal.\n";

}  // namespace

std::string manual_page(const std::vector<CommandText>& commands) {
  const CommandText& program = commands.front();
  std::string text = fmt::format(
      ".TH FATHOM 1 \"\" \"fathom {}\" \"User Commands\"\n"
      ".SH NAME\nfathom \\- serve DeepSeek\\-family language models\n"
      ".SH SYNOPSIS\n\\fBfathom\\fR \\fIcommand\\fR [\\fIflags\\fR] [\\fIMODEL\\fR]\n"
      ".SH DESCRIPTION\n{}\n.PP\n{}\n.SH OPTIONS\n",
      troff(program_version()), troff(program.help), troff(program.footer));
  for (const FlagText& flag : program.flags) text += flag_entry(flag);
  text += ".SH COMMANDS\n";
  for (size_t i = 1; i < commands.size(); ++i) text += command_entry(commands[i]);
  return text + kEnd;
}

}  // namespace fathom
