#!/bin/bash
# Fills DIR with what the Arm tests need and this machine may lack, from Debian 13 through the machine's own mirror, without
# touching the system: DIR/arm64 (Python, libstdc++, KleidiAI, for aarch64) and DIR/host/usr/bin/qemu-aarch64.
# Needs apt and dpkg-deb; 90 MB of downloads. Does nothing when DIR is complete.
set -euo pipefail
dir=$(realpath -m "${1:?usage: sysroot.sh DIR}")
[ -e "$dir/complete" ] && exit
mirror=$(grep -rhoE 'https?://[^ ]+/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d 2>/dev/null | head -1) || true
[ -n "$mirror" ] || { echo "sysroot.sh: no Debian mirror in /etc/apt; needs a Debian machine" >&2; exit 1; }

fetch() {  # architecture, folder, wanted paths, apt-get arguments
  local arch=$1 apt=$dir/apt-$1 root=$dir/$2 paths=$3
  shift 3
  mkdir -p "$apt"/{lists/partial,cache/archives/partial,sources} "$root"
  : >"$apt/status"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$apt/sources/trixie.list"
  local options=(-qq -y -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$apt/sources"
    -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null -o Dir::State::lists="$apt/lists"
    -o Dir::Cache="$apt/cache" -o Dir::State::status="$apt/status" -o APT::Architecture="$arch" -o APT::Architectures::="$arch"
    -o APT::Sandbox::User= -o Debug::NoLocking=1)
  apt-get "${options[@]}" update
  (cd "$apt/cache/archives" && apt-get "${options[@]}" "$@")
  ln -sfn usr/lib "$root/lib"
  for package in "$apt"/cache/archives/*.deb; do dpkg-deb --fsys-tarfile "$package" | tar -x -C "$root" --wildcards "$paths"; done
  rm -rf "$apt"
}
fetch arm64 arm64 './usr/*' --download-only --no-install-recommends install python3.13 libstdc++6 libkleidiai-dev
fetch "$(dpkg --print-architecture)" host './usr/bin/qemu-aarch64' download qemu-user
touch "$dir/complete"
