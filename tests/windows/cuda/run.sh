#!/bin/bash
# usage: run.sh CUDA: Windows' CUDA libraries, which `make windows-cuda` left in build/windows-cuda, beside the build for Linux in the
# folder CUDA, of which they have the device code. Nothing here has a GPU:
#   1. the DLLs export what Linux' libraries do; each kernel of their host code is in its fatbin by its name
#   2. launch.cc calls every group of kernels here and under wine, with a driver that prints what it gets: the same
#   3. without a driver, ONNX Runtime's onnxruntime.dll of PyPI's wheel registers the library; errors name Linux, and the driver
# Says so and ends well where wine cannot be had, or starts nothing. Everything lands in build/windows-cuda-test.
set -euo pipefail
cuda=$(realpath "$1")
cd "$(dirname "$0")/../../.."
here=tests/windows/cuda dir=$PWD/build/windows-cuda-test dlls=$PWD/build/windows-cuda
rm -rf "$dir"/{linux,bin} && mkdir -p "$dir"/{linux,bin}
include=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13/include
includes=(-std=c++20 -O3 -Icustom_ops/include -Icustom_ops -I"$dlls/operators" -isystem custom_ops/src/driver/host -isystem "$include" -D__NV_NO_HOST_COMPILER_CHECK)

python tests/windows/cuda/kernels.py "$dlls/custom_ops/windows" >"$dir/kernels"
python tests/windows/cuda/calls.py "$dir/calls"
. tests/windows/exports.sh
diff <(symbols "$cuda/custom_ops/libquantmoe_cuda.so") <(exports "$dlls/custom_ops/quantmoe_cuda.dll")
missing=$(comm -23 <(symbols "$cuda/ort_ext/libquantmoe_ort_cuda.so") <(exports "$dlls/ort_ext/quantmoe_ort_cuda.dll"))
[ -z "$missing" ] || { echo "quantmoe_ort_cuda.dll lacks $missing"; exit 1; }
echo "the DLLs export what Linux' libraries do"

c++ "${includes[@]:0:2}" -shared -fPIC -isystem "$include" $here/fake_driver.cc -o "$dir/linux/libcuda.so.1"
c++ "${includes[@]:0:5}" $here/launch.cc "$cuda/custom_ops/libquantmoe_cuda_driver.so" -Wl,-rpath,"$cuda/custom_ops" -o "$dir/linux/launch"
QM_KERNELS=$dir/kernels LD_LIBRARY_PATH=$dir/linux "$dir/linux/launch" "$dir/calls" >"$dir/linux/said"

command -v wine >/dev/null || { echo "windows-cuda: not run, no wine here (apt-get install --no-install-recommends wine wine64)"; exit 0; }
# wine's services keep its output open after a program's end, so that a pipe would not close: a file takes it.
export WINEPREFIX=$dir/wine WINEDEBUG=-all WINEDLLOVERRIDES=mscoree,mshtml=
trap 'wineserver -k || true' EXIT
timeout -k 5 300 wine cmd.exe /c ver </dev/null >"$dir/ver" 2>&1 || { echo "windows-cuda: not run, wine does not start a program here"; exit 0; }
version=$(python -c 'import onnxruntime; print(onnxruntime.__version__)')
[ -e "$dir/site/onnxruntime-$version.dist-info" ] || "$(dirname "$(command -v python)")/uv" pip install --quiet --target "$dir/site" --no-deps \
  --only-binary :all: --python-version 3.13 --python-platform x86_64-pc-windows-msvc "onnxruntime==$version"
headers=$(sed -n 's/^ORT_INCLUDE_DIR:[^=]*=//p' "$dlls/CMakeCache.txt")
zig=(python-zig c++ -target x86_64-windows-gnu "${includes[@]}")
cp "$dlls/custom_ops/quantmoe_cuda.dll" "$dlls/ort_ext/quantmoe_ort_cuda.dll" "$dir"/site/onnxruntime/capi/onnxruntime.dll "$dir/bin"
"${zig[@]}" $here/launch.cc "$dlls/custom_ops/libquantmoe_cuda.dll.a" -o "$dir/bin/launch.exe"
"${zig[@]}" '-D_Return_type_success_(condition)=' -isystem "$headers" $here/register.cc -o "$dir/bin/register.exe"
"${zig[@]}" -shared -Wl,--export-all-symbols $here/fake_driver.cc -o "$dir/nvcuda.dll"
cd "$dir/bin"
timeout -k 5 300 wine register.exe </dev/null >../without 2>../errors
tr -d '\r' <../without | diff - <(printf '%s\n' registered "quantmoe: quantmoe.experts = host needs Linux" \
  "CUDA device 0: no NVIDIA driver for CUDA 13 is installed")
mv ../nvcuda.dll .
QM_KERNELS=../kernels timeout -k 5 300 wine launch.exe ../calls </dev/null >../said 2>../errors
cd ../../..
python $here/launches.py "$dlls/custom_ops/windows" "$dir/linux/said" "$dir/said"
