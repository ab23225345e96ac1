#!/bin/bash
# Runs the tests of what runs on a GPU under compute-sanitizer, a choice of each program's tests that
# launches all of its kernels and takes less than a minute.
# usage: gpu_sanitize.sh DIRECTORY [TOOL…]   the programs' directory; tools: memcheck, racecheck,
# initcheck, synccheck (default: all). JOBS=N runs so many at a time; LOGS=DIRECTORY keeps the logs
# of those that are not clean; ONLY='PROGRAM…' runs these programs alone.
set -eu

if [ "$1" != --check-log ]; then
  export DIRECTORY=$1
  shift
fi
[ $# -gt 0 ] || set -- memcheck racecheck initcheck synccheck
SANITIZER=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
TOOLS=$(cd "$(dirname "$0")" && pwd)
export SANITIZER TOOLS
# Without cuBLASLt, in whose kernels racecheck reports races.
export FATHOM_CUBLASLT=none

# Program, filter, a smaller one for racecheck, which is ten times slower than the others, and one
# for initcheck where it is to be another: it takes what bulk copies write for not written.
TESTS="
cached_prefix_cuda_test * *
decode_layers_cuda_test *ShortText* *ShortText/V2LiteInBf16Bf16:*ShortText/V2LiteInE4M3Bf16:Formats/DecodeLayersCuda.ShortText/V3Tp8Fp8Scaled
embedding_cuda_test * *
few_rows_cuda_test Plans/FewRows.*/0:Plans/FewRows.*/6:FewRowsPadding.* FewRowsPadding.*
gpu_decode_layers_test *GpuDecodeLayersShort.* *GpuDecodeLayersShort.*/0
four_bit_moe_cuda_test *CodesOfFourBitFloats*:*WithoutAnAddend* *WithoutAnAddend*
gate_cuda_test GateCuda.EqualsTheCpu:GateCuda.Padding*:GateCuda.Ties* GateCuda.ARowOfPadding*
gpu_model_test GpuRunnerShort.* GpuRunnerShort.OneStep GpuRunnerShort.FewRows
indexer_cuda_test IndexKeysCuda.*:IndexScoresCuda.PassNaNOn:TopKeysCuda.* IndexScoresCuda.PassNaNOn:TopKeysCuda.LeavesOut*:TopKeysCuda.ListsAllKeys
latent_decode_8_bit_cuda_test LatentDecode8BitShort.* Shapes/LatentDecode8Bit.*/0:Shapes/LatentDecode8Bit.*/8:Shapes/LatentDecode8Bit.*/12
latent_decode_cuda_test LatentDecodeShort.* LatentDecodeShort.*
many_rows_cuda_test Shapes/ManyRows.*/0:Fp32/ManyRows.*/0:ManyRowsChain.* ManyRowsShort.*
mha_prefill_cuda_test MhaPrefill.NewTokens*:MhaPrefill.SequencesOfDifferentLengths MhaPrefill.OneTile*
moe_few_rows_cuda_test MoeFewRows.TinyEqualsTheHost:MoeFewRows.PaddingChangesNoOtherRow:MoeOneRow.* MoeFewRows.ThreeTokens*:MoeOneRow.OfFew*
moe_many_rows_cuda_test MoeManyRows.EqualsDoublePrecision:MoeManyRows.SomeTokens* MoeManyRows.SomeTokens*
moe_over_ranks_cuda_test *InBf16*H256_5_0:*InE4m3*Mixed:MoeOverRanksFaults.* *InBf16*H256_1_1:*InE4m3*H256_5_0
one_row_cuda_test OneRow.GivesTheSameBitsAgain OneRow.OfFewColumns
peer_sum_cuda_test *EqualsTheOrderedSum*2Ranks1x7168:*EqualsTheOrderedSum*3Ranks5* *EqualsTheOrderedSum*2Ranks1x7168:*EqualsTheOrderedSum*3Ranks5*
peer_rows_cuda_test *HaveTheBits*2Ranks129x7168:*ComeByIndex*3Ranks*:*ColumnsOfAll*5Ranks* *HaveTheBits*2Ranks1x256:*ComeByIndex*5Ranks*:*ColumnsOfAll*5Ranks*
mtp_rows_cuda_test */0:*/3:*/5 */0:*/3:*/5
query_key_cuda_test * *
rms_norm_cuda_test * *
scaled_absorb_cuda_test ScaledAbsorb.ErrorBeside*:ScaledAbsorb.ResultsIn* ScaledAbsorb.ErrorBeside*
scaled_moe_few_rows_cuda_test ScaledMoeFewRows.PaddingChangesNoOtherRow:ScaledMoeOneRow.OfFew* ScaledMoeFewRows.ThreeTokens*:ScaledMoeOneRow.OfFew*
scaled_linear_cuda_test *Padding*:Plans/ScaledFewRows.*/3:Shapes/ScaledManyRows.*/3:Shapes/QuantizeRowsOnTheGpu.*/2 *Padding*:Shapes/QuantizeRowsOnTheGpu.*/2
scaled_moe_many_rows_cuda_test ScaledMoeManyRows.SomeTokens*:ScaledMoeManyRows.Scales* ScaledMoeManyRows.Scales*
sparse_latent_cuda_test SparseLatentShort.* SparseLatentShort.*
sample_cuda_test SampleCuda.LimitsOfOptions:SampleCuda.EqualLogits:SampleCuda.PenaltiesOfLongHistories SampleCuda.OneShortRow
"

# What racecheck reports of handoffs that are in order by the PTX manual, and that it does not
# follow (docs/kernels/latent_decode_rows.md): bar.arrive of some warps and bar.sync of the others, an
# arrival of one lane after __syncwarp(), a vote over what the lanes have read, a named barrier of the
# computing threads in a kernel that votes by bar.red (docs/kernels/latent_decode_8_bit_rows.md).
# Each says which code is on either side, in either order: a report of which only one side is known
# is a failure.
join='Products<[^=]*>::join<'
multiply='ScaledExpertMultiplier[^=]*::multiply' write='ScaledExpertScaler[^=]*::write'
results='(RowsAttention<[^=]*::end|JoinedShare<[^=]*SumsLayout<\(int\)64>|write_(out|partial)<\(int\)64)'
finish='OneRow::finish_gate_up' one_row='OneRow::multiply'
references='latent_decode_rows_kernel'
reference_read='Attention<[^=]*::multiply_others_values\(' reference_write='Attention<[^=]*::publish\('
task='Copies<[^=]*::begin_task\('  # of index scores: by an mbarrier at which every thread arrives
task_read='Scores<[^=]*::score<'
between() { echo "$1: [^=]*access at [^=]*$2[^=]*=.*access at [^=]*$3"; }
IN_ORDER=$(between Error "$join" "$join"
  between Error "$multiply" "$write"
  between Error "$write" "$multiply"
  between Error "$results" "$results"
  between Error "$finish" "$one_row"
  between Error "$one_row" "$finish"
  between Warning "$references" "$references"
  between Warning "$reference_read" "$reference_write"
  between Warning "$reference_write" "$reference_read"
  between Error "$task_read" "$task"
  between Error "$task" "$task_read")
# decode_layers alone (docs/kernels/decode_layers.md#tests): the functions are common to several kernels.
# Slots of the ring and their turns, by mbarriers of one arrival a warp and by release and acquire; the
# page table and the order of keys, by one arrival after a named barrier; the newest key's row, by one after
# __syncwarp().
copy='copy_bytes_under\(' turn='store_release_in_block\(' turn_seen='load_acquire_in_block\('
slot_read='(multiply_step(_bf16)?<|warp_(first_)?mma_16x8x16(_f16)?\(|load_words\(|load_rope<|Layers<[^=]*::(products|multiply_down|two_rows)<|Steps<[^=]*::(absorb|put_newest_keys|values)\()'
pages='(Steps<[^=]*::run\(|place_token<|list_runs<)' pages_read='(FeederOf<[^=]*::(keys_of|count_of_keys)\(|num_runs<)'
row='(store_(eight|latent)|write_latent_row)' row_read='Steps<[^=]*::put_newest_keys\('
either() { between "$1" "$2" "$3"; between "$1" "$3" "$2"; }
OF_DECODE_LAYERS=$(either Error "$copy" "$slot_read"
  either Error "$turn" "$turn_seen"
  either Error "$pages" "$pages_read"
  either Error "$row" "$row_read")
export IN_ORDER OF_DECODE_LAYERS

# Whether races are all that a log reports, and all of them of those. Each of a report's further
# accesses is a pair with its first.
is_in_order() {
  reports=$(awk '/Race reported/ { first = $0; pairs = 0; next }
                 first && /^========= .*access at/ { print first $0; ++pairs; next }
                 first { if (!pairs) print first; first = "" }
                 END { if (first && !pairs) print first }' "$1")
  known=$IN_ORDER
  case $(basename "${2:-}") in *decode_layers*) known="$known"$'\n'"$OF_DECODE_LAYERS" ;; esac
  [ -n "$reports" ] && grep -q 'PASSED' "$1" && ! grep -q 'FAILED' "$1" &&
    ! echo "$reports" | grep -qvE "$known"
}

# The same, also where the log names kernels and offsets instead of the functions at them.
# usage: all_in_order LOG [PROGRAM]
all_in_order() {
  if is_in_order "$@"; then return; fi
  [ -n "${2:-}" ] || return
  "$TOOLS/sanitizer_sites.py" "$2" "$1" > "$1.resolved" || return
  mv "$1.resolved" "$1"
  is_in_order "$@"
}

if [ "${1:-}" = --check-log ]; then  # LOG [PROGRAM]: of one log alone, for the test of this
  shift
  all_in_order "$@"
  exit
fi

sanitize() {
  tool=$1 program=$2 filter=$3 log=$(mktemp)
  [ "$tool" != racecheck ] || filter=$4
  [ "$tool" != initcheck ] || filter=${5:-$3}
  begin=$SECONDS
  timeout "${SECONDS_EACH:-300}" "$SANITIZER" --tool "$tool" --error-exitcode 99 --print-limit 1000 \
    "$DIRECTORY/$program" --gtest_filter="$filter" --gtest_brief=1 > "$log" 2>&1
  status=$?
  said="FAILED ($status)"
  [ $status != 0 ] || said=clean
  if [ $status = 99 ] && all_in_order "$log" "$DIRECTORY/$program"; then
    status=0 said="clean but for handoffs that it does not follow"
  fi
  printf '%-10s %-26s %4d s  %s\n' "$tool" "$program" $((SECONDS - begin)) "$said"
  [ $status = 0 ] || grep -E '=========|FAILED|Failure' "$log" | head -40
  if [ "$said" != clean ] && [ -n "${LOGS:-}" ]; then cp "$log" "$LOGS/$tool.$program"; fi
  rm -f "$log" "$log.resolved"
  return $((status != 0))  # xargs gives up at 255
}
export -f sanitize all_in_order is_in_order

chosen=$(echo "$TESTS" | awk -v only=" ${ONLY:-} " 'NF && (only ~ /^ *$/ || index(only, " " $1 " "))')
for tool in "$@"; do
  echo "$chosen" | sed "/^$/d; s/^/$tool /"
done | xargs -r -P "${JOBS:-1}" -L 1 bash -c 'sanitize "$0" "$@"'
