#!/bin/sh
# Installs the Debian packages that a purpose needs and that are missing: build, check, fuzz, page,
# conformance.
# usage: install_packages.sh PURPOSE…
set -eu

BUILD="g++ cmake ninja-build pkg-config libboost1.81-dev libboost-json1.81-dev libssl-dev libfmt-dev libspdlog-dev libcli11-dev
  libpcre2-dev libxxhash-dev libexpected-dev libgmock-dev libgtest-dev libbenchmark-dev libedit-dev libyaml-cpp-dev
  python3 python3-pip patch"
CHECK="clang-format git"
FUZZ="clang-19 libclang-rt-19-dev"
PAGE="chromium chromium-driver fonts-dejavu-core python3 python3-venv"
CONFORMANCE="python3 python3-venv"

wanted=
for purpose in "$@"; do
  case $purpose in
    build) wanted="$wanted $BUILD" ;;
    check) wanted="$wanted $CHECK" ;;
    fuzz) wanted="$wanted $FUZZ" ;;
    page) wanted="$wanted $PAGE" ;;
    conformance) wanted="$wanted $CONFORMANCE" ;;
    *) echo "install_packages.sh: unknown purpose '$purpose'" >&2; exit 2 ;;
  esac
done

missing=
for package in $wanted; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' ||
    missing="$missing $package"
done
[ -z "$missing" ] && exit 0

as_root=
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || {
    echo "Missing packages:$missing" >&2
    echo "Install them as root: apt-get install$missing" >&2
    exit 1
  }
  as_root=sudo
fi
echo "Installing:$missing" >&2
$as_root apt-get update -qq
# shellcheck disable=SC2086 # a list of names
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
