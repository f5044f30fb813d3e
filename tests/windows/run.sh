#!/bin/bash
# usage: run.sh [MODEL]: what `make windows` left in build/windows, under wine with ONNX Runtime's own onnxruntime.dll of PyPI's wheel:
#   1. the DLLs export what the Linux libraries do; quantmoe_ort.dll exports the C interface, too, which on Windows can clash with nobody's
#   2. run_models.cc here and there: layers of tests/support/operators/cases.py give the same bytes with each kernel, damaged models are refused alike
#   3. run_packed.cc: the provider's cache under a name that is not ASCII, mapped, written anew while it is mapped, cut off
#   4. the C++ sample on MODEL, in a folder whose name is not ASCII: the tokens of Linux
# Says so and ends well where wine cannot be had, or starts nothing. Everything lands in build/windows-test.
set -euo pipefail
model=${1:+$(realpath "$1")}
cd "$(dirname "$0")/../.."
dir=$PWD/build/windows-test dlls=$PWD/build/windows
command -v wine >/dev/null || { echo "windows: not run, no wine here (apt-get install --no-install-recommends wine wine64)"; exit 0; }
rm -rf "$dir"/{models,folders} && mkdir -p "$dir/bin"
uv=("$(dirname "$(command -v python)")/uv" pip install --quiet --target "$dir/site" --no-deps --only-binary :all:)
version=$(python -c 'import onnxruntime; print(onnxruntime.__version__)')
here=$(python -c 'import onnxruntime; print(onnxruntime.__path__[0])')/capi
[ -e "$dir/site/onnxruntime-$version.dist-info" ] ||
  "${uv[@]}" --python-version 3.13 --python-platform x86_64-pc-windows-msvc "onnxruntime==$version"
headers=$(sed -n 's/^ORT_INCLUDE_DIR:[^=]*=//p' "$dlls/CMakeCache.txt")

# wine's services keep its output open after a program's end, so that a pipe would not close: a file takes it.
export WINEPREFIX=$dir/wine WINEDEBUG=-all WINEDLLOVERRIDES=mscoree,mshtml= LC_ALL=C.UTF-8
under_wine() { # OUTPUT COMMAND...
  timeout -k 5 120 wine "${@:2}" </dev/null >"$1" 2>"$1.errors" || { status=$?; cat "$1" "$1.errors"; return $status; }
  sed -i 's/\r$//' "$1"
}
trap 'wineserver -k || true' EXIT
under_wine "$dir/ver" cmd.exe /c ver || { echo "windows: not run, wine does not start a program here"; exit 0; }

. tests/windows/exports.sh
diff <({ symbols ort_ext/libquantmoe_ort.so; symbols custom_ops/libquantmoe.so | grep -v ^qm_cuda_; } | LC_ALL=C sort -u) <(exports "$dlls/ort_ext/quantmoe_ort.dll")
diff <(symbols custom_ops/libquantmoe.so) <(exports "$dlls/custom_ops/quantmoe.dll")
echo "the DLLs export what the Linux libraries do"

printf 'LIBRARY onnxruntime.dll\nEXPORTS\nOrtGetApiBase\n' >"$dir/onnxruntime.def"
python-zig dlltool -m i386:x86-64 -d "$dir/onnxruntime.def" -l "$dir/onnxruntime.lib"
# -O3, as the libraries: zig builds the C and C++ runtime of each system once for each level.
program() { # SOURCE NAME
  [ "$dir/bin/$2.exe" -nt "$1" ] && [ "$dir/bin/$2" -nt "$1" ] && return
  python-zig c++ -std=c++20 -O3 -w -target x86_64-windows-gnu -municode '-D_Return_type_success_(condition)=' -isystem "$headers" -Ipackages/cpp/include "$1" \
    "$dir/onnxruntime.lib" -o "$dir/bin/$2.exe"
  python-zig c++ -std=c++20 -O3 -target x86_64-linux-gnu.2.28 -isystem "$headers" -Ipackages/cpp/include "$1" "$dir/bin/libonnxruntime.so.1" -Wl,-rpath,"$dir/bin" -o "$dir/bin/$2"
}
ln -sf "$here"/libonnxruntime.so.* "$dir/bin/libonnxruntime.so.1"
cp "$dir"/site/onnxruntime/capi/*.dll "$dlls/ort_ext/quantmoe_ort.dll" "$dir/bin"
program tests/windows/run_models.cc run_models
program samples/cpp/generate.cc generate
packed() { # TARGET PLATFORM OUTPUT: no ONNX Runtime
  python-zig c++ -std=c++20 -O3 -target "$1" "${@:4}" -Iort_ext/src -Icustom_ops/src -Icustom_ops/include tests/windows/run_packed.cc \
    ort_ext/src/provider/packed_file.cc "custom_ops/src/files/mapped_file_$2.cc" custom_ops/src/hashes/blake3.cc -o "$dir/bin/$3"
}
packed x86_64-windows-gnu windows run_packed.exe -municode
packed x86_64-linux-gnu.2.28 posix run_packed

rm -rf "$dir"/cache-* && mkdir "$dir/cache-日本" "$dir/cache-linux"
"$dir/bin/run_packed" "$dir/cache-linux/cache" >"$dir/packed.linux"
under_wine "$dir/packed.windows" "$dir/bin/run_packed.exe" "Z:${dir//\//\\}\\cache-日本\\weights"
diff "$dir/packed.linux" "$dir/packed.windows"
echo "the provider's cache: $(wc -l <"$dir/packed.windows") steps as on Linux"

python tests/windows/models.py "$dir/models"
cd "$dir/models"
for kernel in $(python -c 'from quantmoe.custom_ops import native; print(*(name for name, runs in native.kernels().items() if runs))'); do
  export QUANTMOE_FORCE_KERNEL=$kernel
  ../bin/run_models ../../../ort_ext/libquantmoe_ort.so ./* >"../$kernel.linux"
  under_wine "../$kernel.windows" ../bin/run_models.exe '..\bin\quantmoe_ort.dll' ./*
  # What ONNX Runtime itself says of a file that the system cannot open is the system's.
  diff <(sed -E '/quantmoe|node/!s/(refused:).*/\1/' "../$kernel.linux") <(sed -E '/quantmoe|node/!s/(refused:).*/\1/' "../$kernel.windows")
  refused=$(grep -c refused "../$kernel.windows") && [ "$refused" = "$(grep -c '^damaged' "../$kernel.windows")" ]
  echo "$kernel: $(($(wc -l <"../$kernel.windows") - refused)) layers give the bytes of Linux, $refused damaged models are refused as there"
done
unset QUANTMOE_FORCE_KERNEL

[ "$model" ] || exit 0
folder=$dir/folders/modèle-日本
mkdir -p "$dir/folders" && cp -r "$model" "$folder" && cp "$dir/bin/quantmoe_ort.dll" "$folder"
"$dir/bin/generate" "$folder" 16 1 2 3 >"$dir/tokens.linux"
under_wine "$dir/tokens.windows" "$dir/bin/generate.exe" "Z:${folder//\//\\}" 16 1 2 3
diff "$dir/tokens.linux" "$dir/tokens.windows"
echo "the sample's tokens are those of Linux: $(cat "$dir/tokens.windows")"
