#!/bin/sh
# Prints the section of CHANGELOG.md that a tag names: "v1.2.3" finds "## 1.2.3", "## v1.2.3" and
# "## [1.2.3] - 2026-01-31".
#
# usage: release_notes.sh TAG [CHANGELOG]
set -eu

tag=$1
changelog=${2:-$(dirname "$0")/../CHANGELOG.md}
notes=$(awk -v wanted="${tag#v}" '
  /^## / {
    name = $2
    gsub(/[][]/, "", name)
    sub(/^v/, "", name)
    inside = name == wanted
    next
  }
  inside { print }
' "$changelog" | sed -e '/./,$!d')
if [ -z "$notes" ]; then
  echo "release_notes.sh: $changelog has no section ${tag#v}" >&2
  exit 1
fi
printf '%s\n' "$notes"
