// The second stage of a stream parser: content and tool calls.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "chat/marker_scan.h"
#include "chat/stream_parser.h"

namespace fathom {

// A name longer than this is not a name; it bounds what an unfinished header holds back.
inline constexpr size_t kMaxToolName = 256;

bool is_tool_name(std::string_view name);

// Reads pending text as far as it is decided; a subclass knows the markers.
class ToolCallStage {
 public:
  virtual ~ToolCallStage() = default;

  PendingText& pending() { return pending_; }
  void consume(TextEnd end, StreamDelta& delta);
  bool saw_calls() const { return calls_ > 0; }

 protected:
  // One decision; false when more text is needed (or none is left).
  virtual bool step(TextEnd end, StreamDelta& delta) = 0;
  // What is held back when the text ends.
  virtual void finish(TextEnd end, StreamDelta& delta) = 0;

  void begin_call(std::string_view id, std::string_view name, StreamDelta& delta);
  void add_arguments(std::string_view text, StreamDelta& delta);
  bool wrote_arguments() const { return wrote_arguments_; }

  // Text read in search of a call: white space waits for what it stands beside, anything else
  // becomes content together with what was held before it.
  void take_stray(std::string_view text, StreamDelta& delta);
  void release_held(StreamDelta& delta);

  PendingText pending_;
  std::string held_;  // read and not decided: markers, white space

 private:
  int calls_ = 0;
  bool wrote_arguments_ = false;  // of the current call
};

// Everything is content.
std::unique_ptr<ToolCallStage> make_content_only_stage();

// The markers around calls; what stands between call_begin and separator differs.
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

}  // namespace fathom
