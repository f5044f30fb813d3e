#!/bin/bash
# usage: run.sh FOLDER [OPTION...]: builds a TensorRT engine of an exported folder and times prefill of 128 tokens on this machine's GPU.
set -euo pipefail
model=${1:?usage: run.sh FOLDER [OPTION...]}/model.onnx && shift
library=$(python -c 'import quantmoe; print(quantmoe.trt_library_path())')
caches=$(python - "$model" <<'PYTHON'
import sys
import onnx
graph = onnx.load(sys.argv[1], load_external_data=False).graph
for past in (0, 0, 1024):
    values = (v for v in graph.input if v.name.startswith("past_key_values"))
    dims = ((v.name, v.type.tensor_type.shape.dim) for v in values)
    print(",".join(f"{name}:1x{d[1].dim_value}x{past}x{d[3].dim_value}" for name, d in dims))
PYTHON
)
readarray -t cache <<<"$caches"
shapes() { # NEW TOTAL CACHES
  echo "input_ids:1x$1,position_ids:1x$1,attention_mask:1x$2,$3"
}
exec trtexec --onnx="$model" --staticPlugins="$library" --stronglyTyped \
  --minShapes="$(shapes 1 1 "${cache[0]}")" --optShapes="$(shapes 128 128 "${cache[1]}")" \
  --maxShapes="$(shapes 512 1536 "${cache[2]}")" --shapes="$(shapes 128 128 "${cache[1]}")" "$@"
