#!/bin/sh
# Fetches the pinned sources of XGrammar, checks their hash, unpacks and patches them; prints their
# folder. Quick when they are there already.
# usage: fetch_xgrammar.sh FOLDER
set -eu

VERSION=0.2.8
SHA256=8305646fd2b319d6c3003f51a1665e54cbbe9cba1fb636bc41d0b46434ccbb80

folder=$1
archive=xgrammar-$VERSION.tar.gz
sources=$folder/xgrammar-$VERSION
patch=$(dirname "$0")/../cmake/xgrammar.patch

is_whole() { [ -f "$1" ] && echo "$SHA256  $1" | sha256sum --check --status; }

# The last thing that is written is a copy of the patch.
if ! cmp -s "$patch" "$sources/.patched"; then
  mkdir -p "$folder"
  # Several builds may come here at once.
  exec 9> "$folder/.lock"
  flock 9
  if ! is_whole "$folder/$archive"; then
    echo "Fetching XGrammar $VERSION" >&2
    # The package's own build is not run: pip looks at its name and version only. In a folder of
    # its own, so that what is broken never looks fetched.
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    if ! python3 -m pip download --quiet --disable-pip-version-check --no-deps \
      --no-binary xgrammar --dest "$scratch" "xgrammar==$VERSION" > "$scratch/log" 2>&1; then
      tail -5 "$scratch/log" >&2
      echo "The sources of XGrammar $VERSION could not be fetched with pip from the Python package" \
        "index (is there a network, a pip.conf?). Without one: put $archive (sha256 $SHA256) into" \
        "$folder and build again." >&2
      exit 1
    fi
    is_whole "$scratch/$archive" || {
      echo "$archive, as fetched, has another sha256 than $SHA256; it is not used." >&2
      exit 1
    }
    mv "$scratch/$archive" "$folder/"
  fi
  rm -rf "$sources"
  tar -xzf "$folder/$archive" -C "$folder"
  patch --quiet --strip=1 --directory="$sources" < "$patch"
  cp "$patch" "$sources/.patched"
fi
echo "$sources"
