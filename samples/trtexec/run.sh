#!/bin/bash
# usage: run.sh FOLDER PLAN [OPTION...]: builds a TensorRT engine of an exported folder for this machine's GPU, saves it as PLAN, and times
# its two profiles: prefill of 128 tokens, and one token after 1,024.
set -euo pipefail
model=${1:?usage: run.sh FOLDER PLAN [OPTION...]}/model.onnx plan=${2:?usage: run.sh FOLDER PLAN [OPTION...]} && shift 2
library=$(python -c 'import quantmoe; print(quantmoe.trt_library_path())')
caches=$(python - "$model" <<'PYTHON'
import sys
import onnx
graph = onnx.load(sys.argv[1], load_external_data=False).graph
for past in (0, 1024, 1535):
    values = (v for v in graph.input if v.name.startswith("past_key_values"))
    dims = ((v.name, v.type.tensor_type.shape.dim) for v in values)
    print(",".join(f"{name}:1x{d[1].dim_value}x{past}x{d[3].dim_value}" for name, d in dims))
PYTHON
)
{ read -r empty && read -r half && read -r full; } <<<"$caches"
shapes() { # NEW TOTAL CACHES
  echo "input_ids:1x$1,position_ids:1x$1,attention_mask:1x$2,$3"
}
prefill=$(shapes 128 128 "$empty") decode=$(shapes 1 1025 "$half")
trtexec --onnx="$model" --staticPlugins="$library" --stronglyTyped --saveEngine="$plan" \
  --profile=0 --minShapes="$(shapes 1 1 "$empty")" --optShapes="$prefill" --maxShapes="$(shapes 512 1536 "$half")" \
  --profile=1 --minShapes="$(shapes 1 1 "$empty")" --optShapes="$decode" --maxShapes="$(shapes 1 1536 "$full")" \
  --useProfile=0 --shapes="$prefill" "$@"
trtexec --loadEngine="$plan" --staticPlugins="$library" --useProfile=1 --shapes="$decode" "$@"
