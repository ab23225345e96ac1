#!/bin/sh
# The checks that are not tests: format, how comments begin, include direction, faults that can still be planted,
# self-contained headers, clang-tidy over what has changed (since $TIDY_BASE, if it is set).
set -eu
cd "$(dirname "$0")/.."

git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror
echo "format: ok"
# A comment has its subject first: "Bytes of a page", not "Of a page".
if git grep -nE '(//|#|""")[[:space:]]*Of ' -- src tests tools bench; then
  echo "comments: those above begin with \"Of\", not with their subject" >&2
  exit 1
fi
echo "comments: ok"
python3 tools/check_includes.py
python3 tools/mutants.py --check
python3 tools/check_headers.py
tools/check_tidy.sh ${TIDY_BASE:+"$TIDY_BASE"}
