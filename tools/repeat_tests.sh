#!/bin/sh
# Proves that the tests do not depend on the machine: repeat_tests.sh BUILD_DIR [COUNT] [MODE…]
#
# Runs each test COUNT times (10) in each mode: `alone`, `busy` (beside four processes that compute
# without end) and `scalar` (FATHOM_CPU_ISA=scalar); all three where none is named. TESTS is an
# expression of the tests' names: all that `make test` runs unless it is set. Ends with status 1 if a run has failed; which one stands
# in BUILD_DIR/repeat-MODE.log.
set -u
build=$1
count=${2:-10}
[ $# -ge 2 ] && shift 2 || shift
modes=${*:-alone busy scalar}
tests=${TESTS:-.}
pids=
trap '[ -z "$pids" ] || kill $pids' EXIT
trap 'exit 1' INT TERM

run() {
  ctest --test-dir "$build" -R "$tests" -LE slow --parallel 4 --repeat "until-fail:$count" \
    --output-on-failure > "$build/repeat-$1.log" 2>&1
}

status=0
for mode in $modes; do
  case $mode in
    alone) run alone ;;
    busy)
      for _ in 1 2 3 4; do
        yes > /dev/null &
        pids="$pids $!"
      done
      run busy
      result=$?
      kill $pids
      pids=
      (exit $result)
      ;;
    scalar) FATHOM_CPU_ISA=scalar run scalar ;;
    *) echo "repeat_tests.sh: unknown mode '$mode': alone, busy or scalar" >&2; exit 2 ;;
  esac
  if [ $? -eq 0 ]; then
    echo "$mode: $(grep -c 'Test *#.*Passed' "$build/repeat-$mode.log") runs passed, $count of each test"
  else
    status=1
    echo "$mode: FAILED"
    sed -n '/^The following tests FAILED/,$p' "$build/repeat-$mode.log"
  fi
done
exit $status
