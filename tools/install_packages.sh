#!/bin/sh
# Installs the Debian packages that a purpose needs and that are missing: build, check, fuzz, page,
# conformance, plots, package, package-test.
# usage: install_packages.sh PURPOSE…
set -eu

BUILD="g++ cmake ninja-build pkg-config libboost1.81-dev libboost-json1.81-dev libssl-dev libfmt-dev libspdlog-dev libcli11-dev
  libpcre2-dev libxxhash-dev libexpected-dev libeigen3-dev libgmock-dev libgtest-dev libbenchmark-dev libedit-dev libyaml-cpp-dev
  python3 python3-pip python3-jsonschema patch"
# Without these the build goes on: libjs-katex, the page's formulas; openmpi-bin, mpirun for its tests;
# libzmq3-dev, events of the cache; libucx-dev, pages through shared memory.
BUILD_OPTIONAL="libjs-katex openmpi-bin libzmq3-dev libucx-dev"
CHECK="clang-format clang-tidy git"
FUZZ="clang-19 libclang-rt-19-dev"
PAGE="chromium chromium-driver fonts-dejavu-core python3 python3-venv"
CONFORMANCE="python3 python3-venv"
PLOTS="python3-matplotlib"
PACKAGE="dpkg-dev binutils"
PACKAGE_TEST="debootstrap"

wanted=
optional=
for purpose in "$@"; do
  case $purpose in
    build) wanted="$wanted $BUILD" optional="$optional $BUILD_OPTIONAL" ;;
    check) wanted="$wanted $CHECK" ;;
    fuzz) wanted="$wanted $FUZZ" ;;
    page) wanted="$wanted $PAGE" ;;
    conformance) wanted="$wanted $CONFORMANCE" ;;
    plots) wanted="$wanted $PLOTS" ;;
    package) wanted="$wanted $PACKAGE" ;;
    package-test) wanted="$wanted $PACKAGE_TEST" ;;
    *) echo "install_packages.sh: unknown purpose '$purpose'" >&2; exit 2 ;;
  esac
done

# missing PACKAGE…: those that are not installed.
missing() {
  for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' ||
      printf ' %s' "$package"
  done
}

# shellcheck disable=SC2086 # lists of names, here and below
needed=$(missing $wanted)
useful=$(missing $optional)
[ -z "$needed$useful" ] && exit 0

as_root=
if [ "$(id -u)" != 0 ]; then
  if command -v sudo >/dev/null; then
    as_root=sudo
  else
    [ -z "$needed" ] && exit 0
    echo "Missing packages:$needed" >&2
    echo "Install them as root: apt-get install$needed$useful" >&2
    exit 1
  fi
fi
install() {
  # shellcheck disable=SC2086
  $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends -o Acquire::http::Timeout=20 $1 >/dev/null
}
echo "Installing:$needed$useful" >&2
if [ -n "$needed" ]; then
  $as_root apt-get update -qq
  install "$needed"
fi
if [ -n "$useful" ]; then
  install "$useful" || { $as_root apt-get update -qq && install "$useful"; } ||
    echo "install_packages.sh: going on without$useful" >&2
fi
