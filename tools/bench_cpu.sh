#!/bin/sh
# The CPU tables of docs/performance.md on this machine.
# usage: bench_cpu.sh PROGRAM [BF16_MODEL]
# BF16_MODEL is the bundled model's bf16 checkpoint, which is not in the repository.
set -eu
program=$1
bf16_model=${2:-}
root=$(cd "$(dirname "$0")/.." && pwd)

measure() {
  echo "== $1"
  shift
  "$program" bench latency "$@" --quiet | grep -E "^(Machine|Probe|Prefill|Decode)"
}

for model in "$root/models/fathom-tiny" ${bf16_model:+"$bf16_model"}; do
  measure "bundled model, batch 1: $model" "$model" --input-len 32 --output-len 128 --num-iters 20
  measure "bundled model, 16 sequences" "$model" --batch-size 16 --input-len 32 --output-len 128
  measure "bundled model, prefill of 512" "$model" --input-len 512 --output-len 1 --num-iters 20
done
for shape in v2-lite v2-lite-fp8; do
  measure "$shape shape, 4 layers" "$root/bench/models/$shape" --load-format dummy \
    --num-hidden-layers 4 --input-len 512 --output-len 64 --num-iters 3 --num-iters-warmup 1
done
