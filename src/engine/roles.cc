#include "engine/roles.h"

namespace fathom {

void Roles::Switch::update(bool wants_on, bool wants_off) {
  const bool is_on = on;
  held = (is_on ? wants_off : wants_on) ? held + 1 : 0;
  if (held < kRoleSteps) return;
  held = 0;
  on = !is_on;
  if (!is_on) ++changes;
}

void Roles::Switch::reset() {
  on = false;
  held = 0;
}

void Roles::update(const RoleLoad& load) {
  if (load.is_idle) {
    decode_computes_.reset();
    prefill_takes_.reset();
    return;
  }
  const int64_t step = limits_.prefill_step_rows;
  const bool has_backlog = load.rows_missing >= limits_.backlog_from * step;
  const bool has_none = load.rows_missing <= limits_.no_backlog_to * step;
  const bool decodes_much = load.decoding * limits_.decode_share > limits_.decode_slots;
  decode_computes_.update(has_backlog && load.decoding <= limits_.idle_to,
                          has_none || decodes_much);
  prefill_takes_.update(load.is_full && has_none, !load.is_full || has_backlog);
}

bool Roles::keep_prompt() {
  if (!decode_computes_.on) return false;
  ++prompts_kept_;
  return true;
}

bool Roles::prefill_takes(int64_t choices) const {
  return prefill_takes_.on && choices_ + choices <= limits_.prefill_slots;
}

RoleStats Roles::stats() const {
  return {.decode_computes = decode_computes_.on,
          .prefill_takes = prefill_takes_.on,
          .decode_changes = decode_computes_.changes,
          .prefill_changes = prefill_takes_.changes,
          .prompts_kept = prompts_kept_,
          .requests_taken = requests_taken_};
}

}  // namespace fathom
