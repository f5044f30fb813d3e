#!/bin/bash
# A kernel on Windows without MSVC, a trial (docs/lab/programs.md): nvcc compiles device code here, PyPI's clang the host's code. The
# program runs under wine, without a driver and with one of the test's own. `run.sh FILE.cu...` only compiles host code of these.
# `make test-windows-cuda` calls this.
set -euo pipefail
cd "$(dirname "$0")/../../.."
here=tests/windows/cuda out=$PWD/build/windows-cuda
cuda=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13
mkdir -p "$out/operators"
for operator in custom_ops/ops/*.def; do echo "#include \"ops/${operator##*/}\""; done >"$out/operators/ops.def"
includes=(-I"$here" -Icustom_ops/include -Icustom_ops/src -Icustom_ops -I"$out/operators")
windows=(-isystem "$here/host" -isystem "$cuda/include" -D__NV_NO_HOST_COMPILER_CHECK -std=c++20 -O2)
host() { # FLAG...: the clang inside PyPI's ziglang, whose own command takes no CUDA
  local flags
  mapfile -t flags < <(python-zig c++ -target x86_64-windows-gnu -E -v -x c++ /dev/null 2>&1 | grep -oE -- '-(isystem|D) [^ ]+' | tr ' ' '\n')
  python-zig clang --target=x86_64-w64-windows-gnu -x cuda --cuda-host-only -nocudainc -nocudalib -nostdinc -nostdinc++ \
    -Xclang -target-sdk-version=12.8 "${windows[@]:0:2}" "${flags[@]}" "${windows[@]:2}" "${includes[@]}" -include cuda_runtime.h "$@"
}
if [ $# != 0 ]; then
  for file; do host -fsyntax-only "$file" && echo "$file"; done
  exit
fi
"$cuda/bin/nvcc" -std=c++17 "${includes[@]}" -gencode arch=compute_90a,code=sm_90a -fatbin $here/kernel.cu -o "$out/kernel.fatbin"
host -Xclang -fcuda-include-gpubinary -Xclang "$out/kernel.fatbin" -c $here/kernel.cu -o "$out/kernel.o"
python-zig c++ -target x86_64-windows-gnu "${windows[@]}" "$out/kernel.o" $here/launches.cc -o "$out/kernel.exe"
python-zig c++ -target x86_64-windows-gnu "${windows[@]}" "${includes[@]}" -shared -Wl,--export-all-symbols $here/fake_driver.cc -o "$out/nvcuda.dll.later"
cd "$out"
rm -f nvcuda.dll
# Files, not pipes: wine's services keep their output open.
export WINEPREFIX=$out/wine WINEDEBUG=-all WINEDLLOVERRIDES=mscoree,mshtml=
trap 'wineserver -k || true' EXIT
wine kernel.exe </dev/null >without 2>errors
cp nvcuda.dll.later nvcuda.dll
wine kernel.exe </dev/null >with 2>errors
cat without with | tr -d '\r' >said
diff said - <<END
error 35, y 3
fatbin ba55ed50
attribute 8 is 50000
_Z5scaleIfEv5Scale, grid 4, threads 256, 50000 bytes, stream 0000000000000010
error 0, y 6
END
echo "one kernel is launched through the driver's interface"
