#!/bin/sh
# The comparisons that take minutes: a million strings through two tokenizers, the evaluation sets.
# usage: test_slow.sh BUILD_FOLDER
set -eu
build=$1
root=$(cd "$(dirname "$0")/.." && pwd)

venv="$build/venv"
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install -q tokenizers==0.23.3
"$venv/bin/python" "$root/tools/compare_tokenizers.py" \
  --program "$build/src/tokenizer/tokenizer_compare"
ctest --test-dir "$build" --output-on-failure -L slow
"$build/src/cli/fathom" eval "$root/models/fathom-tiny" --quiet
