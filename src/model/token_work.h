// How much arithmetic a token is, in multiply-adds, as the configuration's shapes say.
#pragma once

#include <cstdint>

#include "checkpoint/model_config.h"

namespace fathom {

// Of one token in the matrices of all layers, without the head.
double token_macs(const ModelConfig& config);

// Of one token and one key that it attends to, in all layers.
double mha_key_macs(const ModelConfig& config);
double absorbed_key_macs(const ModelConfig& config);

// Keys whose attention, at key_macs each, is as much work for a token as all its matrices; >= 1.
int64_t keys_worth_a_row(const ModelConfig& config, double key_macs);

}  // namespace fathom
