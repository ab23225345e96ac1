#!/bin/bash
# Tests the tests of what runs on a GPU: runs those that have to see a fault with each of the faults
# that a build with FATHOM_PLANT_FAULTS can have (src/device/cuda/planted_fault.h), and says which
# did not. Without a fault all of them have to pass. Exit status: 1 if anything is not as it must be.
# usage: gpu_plant.sh DIRECTORY      of the programs of that build; from the repository's root
set -u
directory=$1

# Fault, program, tests one of which has to fail.
FAULTS="
wrong_key decode_layers_cuda_test Formats/DecodeLayersCuda.ShortText/*
swapped_head decode_layers_cuda_test Formats/DecodeLayersCuda.ShortText/*
skipped_handoff decode_layers_cuda_test Formats/DecodeLayersCuda.ShortText/*
dropped_expert decode_layers_cuda_test Formats/DecodeLayersCuda.ShortText/*
wrong_layer_scale decode_layers_cuda_test Formats/DecodeLayersCuda.ShortText/*
extra_row decode_layers_cuda_test Formats/DecodeLayersCuda.ShortText/*
dropped_peer decode_layers_cuda_test Formats/DecodeLayersCuda.SumsOverRanks/V3Tp8Bf16
any_packet decode_layers_cuda_test Formats/DecodeLayersCuda.SumsOverRanks/V3Tp8Bf16
shared_expert_once decode_layers_cuda_test Formats/DecodeLayersCuda.TwoTokens/V3Tp8Bf16
shared_expert_once decode_layers_cuda_test Formats/DecodeLayersCuda.TwoTokens/V2LiteInBf16Bf16
hidden_neighbour decode_layers_cuda_test Formats/DecodeLayersCuda.TwoTokensOfShortText/*
wrong_key decode_layers_cuda_test Formats/DecodeLayersCuda.TwoTokensOfShortText/*
swapped_head decode_layers_cuda_test Formats/DecodeLayersCuda.TwoTokensOfShortText/*
skipped_handoff decode_layers_cuda_test Formats/DecodeLayersCuda.TwoTokensOfShortText/*
dropped_expert decode_layers_cuda_test Formats/DecodeLayersCuda.TwoTokensOfShortText/*
extra_row decode_layers_cuda_test Formats/DecodeLayersCuda.TwoTokensOfShortText/*
shared_expert_once decode_layers_cuda_test Formats/DecodeLayersCuda.FourTokensOfShortText/V3Tp8Bf16
hidden_neighbour decode_layers_cuda_test Formats/DecodeLayersCuda.FourTokensOfShortText/V3*
stale_keys decode_layers_cuda_test Formats/DecodeLayersCuda.ShortText/*
foreign_keys decode_layers_cuda_test Formats/DecodeLayersCuda.NaNStaysInItsSequence/*
wrong_key decode_layers_cuda_test Formats/DecodeLayersCuda.FourTokensOfShortText/V3*
swapped_head decode_layers_cuda_test Formats/DecodeLayersCuda.FourTokensOfShortText/V3*
skipped_handoff decode_layers_cuda_test Formats/DecodeLayersCuda.FourTokensOfShortText/V3*
dropped_expert decode_layers_cuda_test Formats/DecodeLayersCuda.FourTokensOfShortText/V3*
extra_row decode_layers_cuda_test Formats/DecodeLayersCuda.FourTokensOfShortText/V3*
skipped_key_handoff decode_layers_cuda_test Formats/DecodeLayersCuda.ShortText/V2Lite*
skipped_key_handoff decode_layers_cuda_test Formats/DecodeLayersCuda.TwoTokensOfShortText/V2Lite*
half_logit decode_layers_cuda_test Formats/DecodeLayersCuda.ShortText/V2Lite*
half_logit decode_layers_cuda_test Formats/DecodeLayersCuda.TwoTokensOfShortText/V2Lite*
skipped_activations decode_layers_cuda_test Formats/DecodeLayersCuda.ShortText/V2Lite*
skipped_activations decode_layers_cuda_test Formats/DecodeLayersCuda.TwoTokensOfShortText/V2Lite*
wrong_key gpu_decode_layers_test Formats/GpuDecodeLayers.AreNearFloat64/3
wrong_key gpu_decode_layers_test Formats/GpuDecodeLayers.AreNearFloat64/7
half_logit gpu_decode_layers_test Formats/GpuDecodeLayers.AreNearFloat64/7
hidden_neighbour gpu_decode_layers_test Formats/GpuDecodeLayers.SeveralTokensAreNearFloat64/7
wrong_row gpu_engine_test InE4m3/GpuEngineProducts.EveryRowIsAsFloat32HasIt/0
wrong_row gpu_engine_test InE4m3/GpuEngineProducts.EveryRowIsAsFloat32HasIt/1
swapped_query_head gpu_engine_test InE4m3/GpuEngineProducts.EveryRowIsAsFloat32HasIt/0
stale_token gpu_engine_test InE4m3/GpuEngineProducts.EveryRowIsAsFloat32HasIt/0
skipped_launch_wait gpu_engine_test InE4m3/GpuEngineProducts.EveryRowIsAsFloat32HasIt/0
stale_token mtp_rows_cuda_test Widths/MtpRows.InputIsTheTwoNorms/*
wrong_row mtp_rows_cuda_test Widths/MtpRows.StatesGoToTheirSlots*
any_packet peer_sum_cuda_test Shapes/PeerSum.*
unordered_peers peer_sum_cuda_test Shapes/PeerSum.EqualsTheOrderedSum/*
unordered_peers peer_rows_cuda_test Shapes/PeerRowsTest.HaveTheBitsOfPeerSum/*
skipped_begin peer_rows_cuda_test Shapes/PeerRowsTest.*
skipped_end peer_rows_cuda_test Shapes/PeerRowsTest.*
wrong_owner peer_rows_cuda_test Shapes/PeerRowsTest.ComeByIndexFromAllRanks/*
skipped_begin moe_over_ranks_cuda_test Shapes/MoeOverRanks.HasTheBits*:MoeOverRanksGraphs.*
skipped_meet moe_over_ranks_cuda_test Shapes/MoeOverRanks.HasTheBits*:MoeOverRanksGraphs.*
wrong_peer moe_over_ranks_cuda_test Shapes/MoeOverRanks.HasTheBits*
unordered_experts moe_over_ranks_cuda_test Shapes/MoeOverRanks.HasTheBits*
swapped_scale four_bit_moe_cuda_test Rows/FourBitMoe.*/Few
repeated_tokens four_bit_moe_cuda_test Rows/FourBitMoe.OneExpertHasHalfOfTheTokens/Few
wrong_peer gpu_ranks_test GpuExpertParallel.LanesGiveTheBitsOfOneRank
wrong_index_row indexer_cuda_test IndexKeysCuda.WritesTheCpusBytes
wrong_index_page indexer_cuda_test IndexScoresCuda.AreNearDoublePrecision
coarse_limit indexer_cuda_test TopKeysCuda.TellsNeighbouringScoresApart
seen_hidden_key indexer_cuda_test TopKeysCuda.LeavesOutAHiddenKey
wrong_owner gpu_ranks_test Forms/GpuTensorParallel.IsAsNearToFloat32AsOneRankAndTheSameAgain/*
dropped_list_key sparse_latent_cuda_test Ways/SparseLatent.EqualsDoublePrecision/*:SparseLatentShort.*
neighbour_list_key sparse_latent_cuda_test Ways/SparseLatent.EqualsDoublePrecision/*:SparseLatentShort.*
other_sequence sparse_latent_cuda_test Ways/SparseLatent.EqualsDoublePrecision/*:SparseLatentShort.*
lost_split sparse_latent_cuda_test Ways/SparseLatent.EqualsDoublePrecision/*:SparseLatentShort.*
batch_order sparse_latent_cuda_test Ways/SparseLatent.ARowsBitsDoNotDependOnTheBatch/*
unbounded_queries sparse_latent_cuda_test SparseLatentScales.QueriesOfZeroGiveTheMean
rounded_reference sparse_latent_cuda_test SparseLatentScales.LogitsOfAnySize
rounded_reference mha_prefill_cuda_test MhaPrefill.LogitsOfAnySize
"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
missed=0 count=0

# Runs a program's tests with a fault; 0 if they pass.
run() {
  FATHOM_PLANT=$1 timeout "${SECONDS_EACH:-120}" "$directory/$2" --gtest_filter="$3" \
    --gtest_brief=1 > "$log" 2>&1
}

while read -r program filter; do
  if ! run none "$program" "$filter"; then
    echo "no fault: $program $filter FAILS"
    tail -20 "$log"
    missed=$((missed + 1))
  fi
done <<< "$(echo "$FAULTS" | awk 'NF { print $2, $3 }' | sort -u)"

while read -r fault program filter; do
  count=$((count + 1))
  run "$fault" "$program" "$filter"
  status=$?
  # 1: a test failed. Others: it crashed, hung or did not run, and then nobody has looked.
  if [ $status = 1 ] && grep -q 'FAILED' "$log"; then
    printf '%-20s seen by %s (%s failures)\n' "$fault" "$program" "$(grep -c ': Failure' "$log")"
  else
    printf '%-20s NOT SEEN by %s %s (status %s)\n' "$fault" "$program" "$filter" $status
    missed=$((missed + 1))
  fi
done <<< "$(echo "$FAULTS" | sed '/^$/d')"
echo "$count faults, $missed not as they must be"
[ $missed = 0 ]
