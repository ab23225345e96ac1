#!/bin/sh
# Gathers the headers and static libraries that the GPU's tests and benchmarks need from Debian's
# packages into carried/{include,lib} of a folder, and that into carried.tar.gz beside it: unpacked
# in the root of a checkout elsewhere, `make gpu-test` builds without the packages (cmake/CarriedPackages.cmake).
# usage: carry_packages.sh FOLDER
set -eu
folder=$1
cd "$(dirname "$0")/.."
rm -rf "$folder/carried"
mkdir -p "$folder/carried/include" "$folder/carried/lib"

# Every header that the rooms name and every header that those read, but the C and C++ libraries'.
rooms="base tensor device checkpoint placement tokenizer chat cache ops model engine"
named=$(for room in $rooms; do grep -rhoE '^#include <[a-z0-9_/]+\.h(pp)?>' "src/$room"; done |
  grep -E '<(boost|fmt|gtest|spdlog|tl|pcre2\.h|xxhash\.h)' | grep -v boost/json/src | sort -u)
for defines in "" "-DFMT_HEADER_ONLY -DSPDLOG_FMT_EXTERNAL"; do
  # shellcheck disable=SC2086 # a list of flags
  printf '#define PCRE2_CODE_UNIT_WIDTH 8\n%s\n' "$named" | g++ -std=c++20 $defines -M -x c++ -
done | tr ' \\' '\n\n' | grep -E '^/usr/include/(boost|fmt|gtest|spdlog|tl|pcre2|xxh)' | sort -u |
  while read -r header; do
    target=$folder/carried/include/${header#/usr/include/}
    mkdir -p "$(dirname "$target")"
    cp "$header" "$target"
  done

for library in libboost_json libgtest libgtest_main libpcre2-8; do
  cp "$(g++ -print-file-name=$library.a)" "$folder/carried/lib/"
done
tar -C "$folder/.." -czf "$folder/carried.tar.gz" "$(basename "$folder")/carried"
rm -rf "$folder/carried"
echo "$folder/carried.tar.gz: $(du -h "$folder/carried.tar.gz" | cut -f1)"
