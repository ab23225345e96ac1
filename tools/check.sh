#!/bin/sh
# The checks that are not tests: format, include direction, faults that can still be planted, self-contained headers,
# clang-tidy over what has changed (since $TIDY_BASE, if it is set).
set -eu
cd "$(dirname "$0")/.."

git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror
echo "format: ok"
python3 tools/check_includes.py
python3 tools/mutants.py --check
python3 tools/check_headers.py
tools/check_tidy.sh ${TIDY_BASE:+"$TIDY_BASE"}
