#!/bin/sh
# Holds the server to the official clients and to its own document, in a virtual environment of its
# own.
# usage: run.sh PROGRAM EXAMPLES [test…]
#   EXAMPLES: how many requests are made up for each operation of the document
#   test: "openai_test", "openai_test.Tools"; all without one
set -eu
here=$(cd "$(dirname "$0")" && pwd)
program=$(realpath "$1")
examples=$2
shift 2
[ $# -gt 0 ] || set -- openai_test anthropic_test examples_test document_test
venv="$here/../../build/conformance-venv"
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install -q --disable-pip-version-check -r "$here/requirements.txt"
cd "$here"
export FATHOM_TESTED_PROGRAM="$program" FATHOM_TESTED_EXAMPLES="$examples"
exec "$venv/bin/python" -m unittest -v "$@"
