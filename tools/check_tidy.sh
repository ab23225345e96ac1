#!/bin/sh
# Runs clang-tidy (.clang-tidy) over the C++ sources that differ from BASE: the merge base with the upstream branch,
# or the last commit's parent where HEAD is already upstream. Uncommitted changes count.
# usage: check_tidy.sh [BASE]      BASE: a commit, or "all" for every source
set -eu
cd "$(dirname "$0")/.."
base=${1:-}
if [ -z "$base" ]; then
  base=$(git merge-base HEAD '@{upstream}' 2>/dev/null || true)
  if [ -z "$base" ] || [ "$base" = "$(git rev-parse HEAD)" ]; then
    base=$(git rev-parse --verify --quiet HEAD^ || true)
  fi
fi
if [ "$base" = all ]; then
  files=$(git ls-files 'src/*.cc')
elif [ -n "$base" ]; then
  files=$(git diff --name-only --diff-filter=d "$base" -- 'src/*.cc')
else
  files=
fi
# Sources that only nvcc's headers compile are left to nvcc, those with AMX to g++: Debian 12's clang does not know its
# features' names.
files=$(echo "$files" | grep -v -e _cuda -e device/cpu/isa.cc -e _amx.cc || true)
[ -n "$files" ] || { echo "clang-tidy: no source has changed"; exit 0; }
# Rooms that are built in batches have no command for each source: a folder in which they are alone has.
cmake --preset release -B build/tidy -DFATHOM_ALONE="$(echo "$files" | paste -sd ';')" > /dev/null
echo "$files" | xargs -P "$(nproc)" -n 1 clang-tidy -p build/tidy --quiet \
  --extra-arg=-Wno-unknown-warning-option ||
  { echo "clang-tidy: the checks above failed" >&2; exit 1; }
echo "clang-tidy: ok ($(echo "$files" | wc -l) files)"
