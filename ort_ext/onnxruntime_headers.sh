#!/bin/sh
# usage: onnxruntime_headers.sh DIRECTORY
# Unpacks ONNX Runtime's headers from Debian's or Ubuntu's libonnxruntime-dev into DIRECTORY, without root and without
# installing it: the machine's own package sources with the release name changed, a private list and cache, apt's signature
# check. Both releases have long support; the version and the SHA-256 of all headers together, which are the same on every
# architecture, are those below.
set -eu
directory=$(realpath -m "$1") package=libonnxruntime-dev
. /etc/os-release
case $ID in
  debian)
    release=trixie version=1.21.0+dfsg-1
    sum=85e733da5cad0e8a2c7bf035279904ae0795c54a3a82a989f6139965b419e528 ;;
  ubuntu)
    release=resolute version=1.23.2+dfsg-6ubuntu1
    sum=92069edf34bac34223528aa1c81df249ac2f1e52957c1c7cc169f2f1ad8bc117 ;;
  *) echo "$ID has no apt archive with $package" >&2 && exit 1 ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/sources" "$work/lists/partial" "$work/cache/archives/partial" "$work/root"
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
    -o Dir::Cache="$work/cache" -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none "$@"
}
apt update >&2 || true # a mirror without this release is no error as long as another one has it
cd "$work"
uri=$(apt download --print-uris "$package=$version") ||
  { echo "this machine's package sources have no $package $version of $ID's release $release" >&2 && exit 1; }
echo "Fetching ONNX Runtime's headers: $(echo "${uri%% *}" | tr -d \')"
apt download "$package=$version" >&2
dpkg -x "$package"_*.deb root
found=$(cd root/usr/include && find . -name '*.h' | LC_ALL=C sort | xargs cat | sha256sum)
[ "${found%% *}" = "$sum" ] ||
  { echo "the headers of $package $version have SHA-256 ${found%% *}, expected $sum" >&2 && exit 1; }
mkdir -p "$directory" && cp -r root/usr/include/. "$directory"
