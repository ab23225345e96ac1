#!/bin/sh
# The comparisons that take minutes: a million strings through two tokenizers, five thousand schemas
# through an independent validator, four-bit files of other libraries (5 GB of packages), the
# evaluation sets.
# usage: test_slow.sh BUILD_FOLDER
set -eu
build=$1
root=$(cd "$(dirname "$0")/.." && pwd)

venv="$build/venv"
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install -q tokenizers==0.23.3 jsonschema==4.26.0
# The packing libraries without their dependencies, of which they pin old versions.
"$venv/bin/pip" install -q -r "$root/tools/requirements-four-bits.txt"
"$venv/bin/pip" install -q --no-deps --no-build-isolation compressed-tensors==0.20.0 \
  loguru==0.7.3 autoawq==0.2.9 auto-gptq==0.7.1 gptqmodel==7.7.0
"$venv/bin/python" "$root/tools/compare_tokenizers.py" \
  --program "$build/src/tokenizer/tokenizer_compare"
# Its Python for the tests that want these packages.
PATH="$(cd "$venv/bin" && pwd):$PATH" ctest --test-dir "$build" --output-on-failure -L slow
"$build/src/cli/fathom" eval "$root/models/fathom-tiny" --quiet
