#!/bin/sh
# Installs the package into a bare Debian root made for it, uses what it brought, and removes it.
# Needs root and debootstrap.
#
# usage: package_test.sh PACKAGE
set -eu

package=$(realpath "$1")
work=$(mktemp -d)
root=$work/root
server=
clean() {
  [ -z "$server" ] || kill -KILL "$server" 2> /dev/null || true
  if mountpoint -q "$root/proc"; then umount "$root/proc"; fi
  rm -rf "$work"
}
trap clean EXIT

fail() {
  echo "package_test.sh: $*" >&2
  exit 1
}
inside() { chroot "$root" "$@"; }

# The archive that this machine's own packages come from.
set -- $(apt-get indextargets --format '$(SITE) $(CODENAME)' 'Created-By: Packages' | sort -u |
  grep -v -- - | head -1)
debootstrap --variant=minbase "$2" "$root" "$1" > "$work/debootstrap.log" 2>&1 ||
  { tail -5 "$work/debootstrap.log" >&2; fail "no bare root"; }
mount -t proc proc "$root/proc" 2> /dev/null || mount --bind /proc "$root/proc"
cp /etc/resolv.conf "$root/etc/resolv.conf"

cp "$package" "$root/tmp/fathom.deb"
inside apt-get update -qq
inside env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
  /tmp/fathom.deb > "$work/install.log" 2>&1 || { tail -5 "$work/install.log" >&2; fail "not installed"; }

# Program, libraries and version.
version=$(inside dpkg-query -W -f '${Version}' fathom)
[ "$(inside fathom --version | head -1)" = "fathom $version" ] || fail "--version is not $version"
if inside ldd /usr/bin/fathom | grep 'not found'; then fail "a library is not in Depends"; fi
[ -z "$(inside dpkg -V fathom)" ] || fail "files differ from their checksums"
[ "$(inside fathom run -q 'What is 12 + 30?' --temperature 0)" = "12 + 30 = 42." ] ||
  fail "the bundled model does not answer"

# The service, as its unit file starts it.
unit=$root/usr/lib/systemd/system/fathom.service
command=$(sed -n 's/^ExecStart=//p' "$unit")
[ "$command" = "/usr/bin/fathom serve --config /etc/fathom/config.yaml" ] || fail "ExecStart=$command"
# shellcheck disable=SC2086 # a command line
chroot "$root" $command --port 0 2> "$work/serve.log" &
server=$!
tries=0
until grep -q 'serving .* on http' "$work/serve.log"; do
  tries=$((tries + 1))
  [ $tries -lt 600 ] && kill -0 "$server" || { cat "$work/serve.log" >&2; fail "no server"; }
  sleep 0.2
done
kill -TERM "$server"
wait "$server" || fail "the server ended with status $?"
server=

# Manual page and completions.
gzip -dc "$root/usr/share/man/man1/fathom.1.gz" | grep -q '^\.SH SYNOPSIS' || fail "no manual page"
for file in bash-completion/completions/fathom zsh/vendor-completions/_fathom \
  fish/vendor_completions.d/fathom.fish; do
  grep -q max-num-seqs "$root/usr/share/$file" || fail "no completion $file"
done
inside bash -n /usr/share/bash-completion/completions/fathom

inside dpkg --purge fathom > "$work/purge.log" 2>&1 || { cat "$work/purge.log" >&2; fail "not removed"; }
for path in usr/bin/fathom usr/share/fathom usr/share/doc/fathom etc/fathom; do
  [ ! -e "$root/$path" ] || fail "/$path is left"
done
echo "fathom $version: installed, used and removed"
