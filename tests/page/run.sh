#!/bin/sh
# Runs page_test.py with its arguments, in a virtual environment of its own.
# usage: run.sh [--server URL] [--pictures FOLDER] [unittest's arguments]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv="$here/../../build/page-venv"
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install -q -r "$here/requirements.txt"
exec "$venv/bin/python" "$here/page_test.py" "$@"
