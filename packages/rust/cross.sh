#!/bin/bash
# usage: cross.sh OUT RID...: builds libquantmoe_text for platforms by cargo and PyPI's clang, as OUT/RID/LIBRARY. Platforms whose standard
# library Rust lacks here are named and left out; it then ends with 3.
set -euo pipefail
out=$(realpath -m "$1") here=$(cd "$(dirname "$0")" && pwd) sysroot=$(rustc --print sysroot) status=0
host=$(rustc -vV | sed -n 's/^host: //p')
export MACOSX_DEPLOYMENT_TARGET=13.0
for rid in "${@:2}"; do
  link=(-C "linker=$here/zig-cc") strip=true
  case $rid in
    linux-x64) target=x86_64-unknown-linux-gnu zig=x86_64-linux-gnu.2.28 library=libquantmoe_text.so ;;
    linux-arm64) target=aarch64-unknown-linux-gnu zig=aarch64-linux-gnu.2.28 library=libquantmoe_text.so ;;
    win-x64) target=x86_64-pc-windows-gnullvm zig=x86_64-windows-gnu library=quantmoe_text.dll ;;
    osx-arm64) target=aarch64-apple-darwin zig=aarch64-macos.13.0 library=libquantmoe_text.dylib ;;
    *) echo "$rid: expected linux-x64, linux-arm64, win-x64 or osx-arm64" >&2 && exit 1 ;;
  esac
  rm -rf "${out:?}/$rid"
  if ! [ -d "$sysroot/lib/rustlib/$target/lib" ]; then
    echo "no text library for $rid: Rust has no standard library for $target here; rustup target add $target" >&2
    status=3
    continue
  fi
  if [ "$rid" = osx-arm64 ]; then # zig's linker exports all symbols; Rust's strips by -x, as a tool that strips later takes the signature away
    rm -rf "$out/macos" && mkdir -p "$out/macos"
    for name in System c m iconv; do # which are all in libSystem, except iconv, which nothing calls; lld does not know arm64e.x1
      sed -E 's/arm64e\.x1-[a-z]+,? ?//g' "$(python -c 'import ziglang; print(*ziglang.__path__)')/lib/libc/darwin/libSystem.tbd" >"$out/macos/lib$name.tbd"
    done
    link=(-C "linker=$sysroot/lib/rustlib/$host/bin/rust-lld" -C linker-flavor=ld64.lld -C "link-args=-L$out/macos -S -x") strip=false
  fi
  export ZIG_TARGET=$zig "CC_${target//-/_}=$here/zig-cc" "AR_${target//-/_}=ar"
  CARGO_PROFILE_RELEASE_STRIP=$strip cargo rustc --quiet --release --locked --package quantmoe-text --manifest-path "$here/Cargo.toml" \
    --target-dir "$out/cargo" --target "$target" --lib -- "${link[@]}"
  mkdir -p "$out/$rid"
  cp "$out/cargo/$target/release/$library" "$out/$rid"
done
exit $status
