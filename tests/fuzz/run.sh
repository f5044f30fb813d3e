#!/bin/bash
# The fuzz targets at once: run.sh BUILD SECONDS SEED (0: another one each time) RUNS (-1: any number). Corpora stay in build/corpus, a failing
# input in build/; of a target that fails, the end of its log is printed.
set -u
cd "$(dirname "$0")/../.."
build=$1 seconds=$2 seed=$3 runs=$4 status=0
declare -A pid
targets=(claim layer nodes packed rows settings states)
for target in "${targets[@]}"; do
  mkdir -p "build/corpus/$target"
  python -c "import random; random.seed(1); [open(f'build/corpus/$target/seed{i}', 'wb').write(random.randbytes(250)) for i in range(200)]"
  "$build/fuzz_$target" -max_total_time="$seconds" -runs="$runs" -seed="$seed" -max_len=512 -len_control=0 -artifact_prefix=build/ \
    "build/corpus/$target" >"build/fuzz-$target.log" 2>&1 &
  pid[$target]=$!
done
python tests/fuzz/gguf_reader.py build/corpus/gguf_reader -max_total_time="$seconds" -seed="$seed" -max_len=16384 -len_control=0 \
  -rss_limit_mb=4096 -artifact_prefix=build/ >build/fuzz-gguf_reader.log 2>&1 &
pid[gguf_reader]=$!
python tests/fuzz/checkpoint.py "$seconds" "$seed" >build/fuzz-checkpoint.log 2>&1 &
pid[checkpoint]=$!
for target in "${targets[@]}" gguf_reader checkpoint; do
  if wait "${pid[$target]}"; then
    sed -nE "s/^Done ([0-9]*) runs.*/fuzz $target: \1 executions/; /executions$/p" "build/fuzz-$target.log"
  else
    status=1
    tail -n 60 "build/fuzz-$target.log"
    echo "fuzz $target failed"
  fi
done
exit $status
