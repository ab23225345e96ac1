// The second stage of a stream parser: separates tool calls from content.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "chat/marker_scan.h"
#include "chat/stream_parser.h"

namespace fathom {

// Longer names are not accepted; this bounds the text that an unfinished header holds back.
inline constexpr size_t kMaxToolName = 256;

bool is_tool_name(std::string_view name);

// Parses pending text as far as it is decided. Subclasses know the markers.
class ToolCallStage {
 public:
  virtual ~ToolCallStage() = default;

  PendingText& pending() { return pending_; }
  void consume(TextEnd end, StreamDelta& delta);
  bool saw_calls() const { return calls_ > 0; }

 protected:
  // Makes one decision. Returns false if more text is needed, or none is left.
  virtual bool step(TextEnd end, StreamDelta& delta) = 0;
  // Handles the text held back at the end.
  virtual void finish(TextEnd end, StreamDelta& delta) = 0;

  void begin_call(std::string_view id, std::string_view name, StreamDelta& delta);
  void add_arguments(std::string_view text, StreamDelta& delta);
  bool wrote_arguments() const { return wrote_arguments_; }

  // Handles text found while looking for a call: white space is held until the text beside it is
  // known; anything else becomes content, preceded by what was held.
  void take_stray(std::string_view text, StreamDelta& delta);
  void release_held(StreamDelta& delta);

  PendingText pending_;
  std::string held_;  // consumed but not decided: markers, white space

 private:
  int calls_ = 0;
  bool wrote_arguments_ = false;  // of the current call
};

// A stage that treats everything as content.
std::unique_ptr<ToolCallStage> make_content_only_stage();

// The markers around calls. The header is the text between call_begin and the separator.
struct CallMarkers {
  enum class Header {
    kTypeThenFence,  // type SEPARATOR name \n ```json \n arguments \n ```   (V3, R1)
    kName,           // name SEPARATOR arguments                             (V3.1)
    kKimiId,         // functions.name:index SEPARATOR arguments
  };
  std::string_view block_begin;
  std::string_view call_begin;
  std::string_view separator;
  std::string_view call_end;
  std::string_view block_end;
  Header header;
};
std::unique_ptr<ToolCallStage> make_marked_call_stage(const CallMarkers& markers);

std::unique_ptr<ToolCallStage> make_dsml_stage();  // V3.2
// GLM-4.7, GLM-5. `tools` say which arguments are strings.
std::unique_ptr<ToolCallStage> make_glm_stage(std::span<const Tool> tools);
// GigaChat 3 and 3.1. Without tools, too, an answer ends at the message's end.
std::unique_ptr<ToolCallStage> make_gigachat_stage(bool expect_tools);

}  // namespace fathom
