#!/bin/sh
# Makes a Debian package of a build: program, bundled model, unit file, manual page, completions and
# documents. Prints its path.
#
# usage: make_package.sh BUILD OUTPUT_FOLDER
set -eu

cd "$(dirname "$0")/.."
source=$PWD
build=$(realpath "$1")
mkdir -p "$2"
output=$(realpath "$2")
umask 022
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root

DESTDIR=$root cmake --install "$build" --prefix /usr --component fathom --strip > "$work/install.log"
version=$("$build/src/cli/fathom" --version | sed -n '1s/^fathom //p')
architecture=$(dpkg --print-architecture)

gzip -9n "$root/usr/share/man/man1/fathom.1"
install -d "$root/usr/lib/systemd/system" "$root/etc/fathom" "$root/DEBIAN"
# The comment at its top tells how to install without a package.
sed -e '1,/^\[Unit\]/{/^\[Unit\]/!d}' -e 's,/usr/local/bin/,/usr/bin/,' \
  "$source/deploy/systemd/fathom.service" > "$root/usr/lib/systemd/system/fathom.service"
install -m 644 "$source/deploy/debian/config.yaml" "$root/etc/fathom/config.yaml"
echo /etc/fathom/config.yaml > "$root/DEBIAN/conffiles"
for script in postinst prerm postrm; do
  install -m 755 "$source/deploy/debian/$script" "$root/DEBIAN/$script"
done

# dpkg-shlibdeps wants to stand in a source package.
mkdir -p "$work/package/debian"
printf 'Source: fathom\n\nPackage: fathom\nArchitecture: any\n' > "$work/package/debian/control"
depends=$(cd "$work/package" && dpkg-shlibdeps -O "$root/usr/bin/fathom" 2> "$work/shlibdeps.log" |
  sed -n 's/^shlibs:Depends=//p') || { cat "$work/shlibdeps.log" >&2; exit 1; }

(cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum > DEBIAN/md5sums)
size=$(du -sk --exclude=DEBIAN "$root" | cut -f1)
sed -e "s/@VERSION@/$version/" -e "s/@ARCHITECTURE@/$architecture/" -e "s/@SIZE@/$size/" \
  -e "s/@DEPENDS@/$depends/" "$source/deploy/debian/control" > "$root/DEBIAN/control"
package=$output/fathom_${version}_$architecture.deb
# Whole or not at all; level 2 packs the program's kernels faster than the default.
dpkg-deb --root-owner-group -Zxz -z2 --build "$root" "$work/package.deb" > /dev/null
mv "$work/package.deb" "$package"
echo "$package"
