// The prefill site of an engine that is separated within one process, and what the two sites share.
//
// The prefill site is an engine of its own, on lanes of its own. The engine that owns this decodes:
// it orders its prompts there, and a page's way is one copy from pool to pool, by the decode site's
// thread. While roles have changed, the prefill site gets whole requests too.
#pragma once

#include <memory>
#include <vector>

#include "engine/engine.h"

namespace fathom {

// Any thread may call every method.
class Sites {
 public:
  // `options` and `sites` as Engine::create_separated() has them.
  static Result<Sites> create(const EngineOptions& options, std::unique_ptr<Runner> prefill,
                              const Runner& decode, const SitesOptions& sites,
                              const std::shared_ptr<const Tokenizer>& tokenizer);

  // Options of the engine that decodes.
  EngineOptions decode_options(const EngineOptions& options) const;

  Engine& prefill() const { return *prefill_; }
  Result<> is_alive() const;

  // From a lane's number among all lanes to that of its site. Errors: one that is not there, or is
  // of the prefill site.
  Result<> choose_lane(Request& request) const;
  // Whether the prefill site takes the request whole.
  bool takes(const Request& request) const;
  Result<RequestId> submit(Request request, EventSink sink) const;
  // Whether an id is of a request that it took.
  bool has(RequestId request) const;

  // Returns the combined statistics of both sites, given the decode site's.
  EngineStats with_prefill(EngineStats decode) const;

 private:
  Sites() = default;

  SitesOptions sites_;
  std::shared_ptr<Roles> roles_;
  std::shared_ptr<PieceMailbox> mailbox_;
  std::unique_ptr<Engine> prefill_;
};

}  // namespace fathom
