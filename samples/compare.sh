#!/bin/bash
# usage: compare.sh MODEL_FOLDER [TEXT]: builds the samples, lets each go on from TEXT and fails unless all print the same tokens.
# build/samples-* are the programs. C# and Rust run where dotnet and rustc stand.
set -euo pipefail
model=$(realpath "$1") && cd "$(dirname "$0")"
build=$(realpath ..)/build
text=${2:-Then said the captain of the host,}
tokenizer() { # EXPRESSION ARGUMENT...: of the folder's tokenizer t and the arguments a
  python -c 'import sys; from tokenizers import Tokenizer; a = sys.argv[3:]; t = Tokenizer.from_file(sys.argv[1]); print(*eval(sys.argv[2]))' \
    "$model/tokenizer.json" "$@"
}
read -ra prompt <<<"32 $(tokenizer 't.encode(a[0]).ids' "$text")"
failed=0 expected=

same() { # NAME COMMAND...: the tokens it prints
  local tokens
  tokens=$("${@:2}" "$model" "${prompt[@]}") || tokens="exit code $?"
  tokens=${tokens%% } expected=${expected:-$tokens}
  printf '%-6s %s\n' "$1" "$tokens"
  [ "$tokens" = "$expected" ] || failed=1
}

same python python python/generate.py
same genai python genai/generate.py

# The headers that the library was built with, Python's ONNX Runtime.
headers=$(sed -n 's/^ORT_INCLUDE_DIR:[^=]*=//p' "$build"/py3-*/CMakeCache.txt)
cmake -S cpp -B "$build/samples-cpp" -DORT_INCLUDE_DIR="$headers" \
  -DORT_LIBRARY_DIR="$(python -c 'import onnxruntime; print(onnxruntime.__path__[0])')/capi" >/dev/null
cmake --build "$build/samples-cpp" >/dev/null
same cpp "$build/samples-cpp/generate"

log=$(mvn -q -B -f java/pom.xml package) || { echo "$log" && exit 1; } # it colours its output even when nothing is printed
same java java -jar java/target/generate.jar

export ORT_DYLIB_PATH # of Python's ONNX Runtime
ORT_DYLIB_PATH=$(python -c 'import glob, onnxruntime; print(glob.glob(onnxruntime.__path__[0] + "/capi/libonnxruntime.so.*")[0])')
if sort -VC <<<"1.92"$'\n'"$(rustc --version 2>/dev/null | cut -d " " -f 2)"; then # ort's oldest
  CARGO_PROFILE_DEV_DEBUG=0 cargo build -q --locked --manifest-path rust/Cargo.toml --target-dir "$build/rust"
  same rust "$build/rust/debug/generate"
else
  echo 'rust not run: no Rust 1.92 here'
fi

if command -v dotnet >/dev/null; then
  dotnet build -v q --artifacts-path "$build/samples-csharp" csharp >/dev/null
  same csharp dotnet "$build/samples-csharp/bin/Generate/debug/Generate.dll"
else
  echo 'csharp not run: no dotnet here'
fi
tokenizer '[a.pop(0) + t.decode([int(i) for i in a])]' "$text" $expected
exit $failed
