// Multiply-adds of a token, computed from the configuration's shapes.
#pragma once

#include <cstdint>

#include "checkpoint/model_config.h"

namespace fathom {

// Multiply-adds of one token in the matrices of all layers, without the head.
double token_macs(const ModelConfig& config);

// Multiply-adds of one token and one key that it attends to, in all layers.
double mha_key_macs(const ModelConfig& config);
double absorbed_key_macs(const ModelConfig& config);

// Multiply-adds of one token and one key that its indexer scores, in all layers; 0 without one.
double index_key_macs(const ModelConfig& config);

// Keys whose attention, at key_macs each, costs a token as much as all its matrices; >= 1.
int64_t keys_worth_a_row(const ModelConfig& config, double key_macs);

}  // namespace fathom
