#!/bin/sh
# Runs every fuzz target of a folder on its committed corpus for some seconds each.
# usage: run_fuzz.sh FOLDER SECONDS
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$1
seconds=$2
failed=0
for target in "$folder"/*_fuzz; do
  name=$(basename "$target" _fuzz)
  found=$(mktemp -d)
  echo "fuzz: $name, $seconds s"
  # New inputs go to a scratch folder; a crash is written there and named.
  # A minute for one input, by the clock: on a busy machine a process may stand still for seconds.
  if "$target" -max_total_time="$seconds" -timeout=60 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="$found/" "$found" "$root/fuzz/corpus/$name" > "$found.log" 2>&1; then
    grep -E 'number_of_executed_units|average_exec_per_sec' "$found.log" || true
    rm -r "$found" "$found.log"
  else
    tail -40 "$found.log"
    echo "fuzz: $name FAILED; inputs in $found"
    failed=1
  fi
done
exit $failed
