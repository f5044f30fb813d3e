#!/bin/bash
# usage: compare.sh MODEL_FOLDER: runs every sample on the folder and fails unless all print the same tokens.
set -euo pipefail
model=$(realpath "$1") && cd "$(dirname "$0")"
prompt=(16 1 2 3 4 5)
library=$(python -c 'import quantmoe; print(quantmoe.ort_library_path())')
runtime=$(python -c 'import onnxruntime; print(onnxruntime.__path__[0])')/capi
cmake -S cpp -B ../build/samples-cpp -DORT_LIBRARY_DIR="$runtime" >/dev/null
cmake --build ../build/samples-cpp >/dev/null

python_tokens=$(python python/generate.py "$model" "${prompt[@]}")
genai_tokens=$(python genai/generate.py "$model" "${prompt[@]}")
cpp_tokens=$(../build/samples-cpp/generate "$library" "$model" "${prompt[@]}")
# Maven colours its output even when nothing is printed by itself.
java_tokens=$(mvn -q -B -f java/pom.xml compile exec:java -Dexec.args="$library $model ${prompt[*]}" |
  sed 's/\x1b\[[0-9;]*m//g' | grep .)
printf 'python %s\ngenai  %s\ncpp    %s\njava   %s\n' "$python_tokens" "$genai_tokens" "$cpp_tokens" "$java_tokens"
[ "$python_tokens" = "$genai_tokens" ] && [ "$python_tokens" = "$cpp_tokens" ] && [ "$python_tokens" = "$java_tokens" ]
