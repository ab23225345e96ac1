#!/bin/sh
# Every robustness test in turn: run.sh BUILD_DIR. ROBUST_SECONDS and ROBUST_SLACK: robustness.py.
set -u
cd "$(dirname "$0")/../.."
failed=
for test in tests/robustness/*_test.py; do
  python3 "$test" "$1/src/cli/fathom" . "$1/tests/robustness/fathom_with_faults" ||
    failed="$failed $(basename "$test")"
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
