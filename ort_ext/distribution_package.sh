#!/bin/sh
# usage: distribution_package.sh PACKAGE DIRECTORY
# Unpacks a Debian or Ubuntu package into DIRECTORY without root and without installing it, from the first release that
# has it: the machine's own package sources with the release name changed, a private list and cache, apt's signature check.
set -eu
package=$1 directory=$2
. /etc/os-release
case $ID in
  debian) release=trixie ;;
  ubuntu) release=resolute ;;
  *) echo "$ID has no apt archive with $package" >&2 && exit 1 ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/sources" "$work/lists/partial" "$work/cache/archives/partial" "$directory"
# Only the distribution's archive has a component main (Ubuntu: or universe) under the release's own name.
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
  [ -f "$file" ] && sed -nE "s/^(deb .*) $VERSION_CODENAME ((main|universe).*)/\1 $release \2/p" "$file"
done >"$work/sources/release.list"
for file in /etc/apt/sources.list.d/*.sources; do
  [ -f "$file" ] && awk -v RS= -v ORS='\n\n' -v old="$VERSION_CODENAME" -v new="$release" '
    /(^|\n)Types:[^\n]*deb/ && /(^|\n)Components:[^\n]* main/ && match($0, "(^|\n)Suites:[^\n]* " old "([ \n]|$)") {
      gsub(/(^|\n)Suites:[^\n]*/, "\nSuites: " new); sub(/^\n/, ""); print }' "$file"
done >"$work/sources/release.sources"
apt() {
  apt-get -qq -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$work/sources" -o Dir::State::Lists="$work/lists" \
    -o Dir::Cache="$work/cache" -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none "$@" >&2
}
apt update || true # a mirror without this release is no error as long as another one has it
(cd "$work" && apt download "$package")
dpkg -x "$work/$package"_*.deb "$directory"
