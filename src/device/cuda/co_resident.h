// Kernels whose CTAs wait for one another on flags in device memory: all of a launch's CTAs must be
// co-resident, or the resident ones wait for ever for the others.
//
// They are the MoE kernels for few tokens and for one (moe_few_rows, moe_one_row, and their e4m3
// forms), the router's gate_spread, latent_decode's four forms and decode_layers. Each is launched
// by launch_co_resident() and by nothing else. Three rules prevent the deadlock:
//
//   * A launch of more CTAs than its budget or the device can hold is refused on the host.
//   * Launches of one stream: dependent launches begin only when every CTA of the one before has
//     begun, so at most the next kernel's CTAs share the SMs, and these wait for nothing but the
//     earlier launch's end.
//   * Launches of two engines: two such grids at a time may each hold a part of the SMs. Engines of
//     one process take turns, step by step, on the device (DeviceTurn). Processes without MPS are
//     time-sliced: a process has the whole device in its slice. With MPS processes share the SMs;
//     these launches are cooperative then, which the device begins as a whole or not at all. They
//     are not cooperative otherwise: such a launch does not begin while the one before it ends.
//
// The step watchdog ends what these rules do not prevent (engine/step_watchdog.h).
#pragma once

#include <string>
#include <vector>

#include "device/cuda/launch.h"

namespace fathom::cuda {

// Throws unless all CTAs of the launch, no more than `sms`, can be co-resident on the device.
void require_co_resident(const char* name, const void* kernel, const LaunchShape& shape, int sms,
                         DeviceContext& device);

// Names of the kernels that launch_co_resident() has launched or captured on this thread since the
// log was made, each once; an inner log's too. Reports what a hung step was doing.
class CoResidentLog {
 public:
  CoResidentLog();
  ~CoResidentLog();
  CoResidentLog(const CoResidentLog&) = delete;
  CoResidentLog& operator=(const CoResidentLog&) = delete;

  // "gate_spread, moe_few_rows"; "none".
  std::string text() const;
  static void add(const char* name);

 private:
  CoResidentLog* const outer_;
  std::vector<const char*> names_;
};

// launch() for a kernel whose CTAs wait for one another. `name` outlives the program's logs; `sms`
// is the number of SMs that the launch may use, with one CTA or more on each.
template <typename... Parameters, typename... Arguments>
void launch_co_resident(const char* name, void (*kernel)(Parameters...), LaunchShape shape, int sms,
                        GpuStream stream, Arguments&&... arguments) {
  require_co_resident(name, reinterpret_cast<const void*>(kernel), shape, sms, stream.device());
  CoResidentLog::add(name);
  shape.cooperative = stream.device().is_shared_by_mps();
  launch(kernel, shape, stream, std::forward<Arguments>(arguments)...);
}

}  // namespace fathom::cuda
