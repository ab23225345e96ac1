#!/bin/sh
# The checks that are not tests: format, include direction, self-contained headers.
set -eu
cd "$(dirname "$0")/.."

git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror
echo "format: ok"
python3 tools/check_includes.py
python3 tools/check_headers.py
