#!/bin/bash
# usage: run.sh FOLDER PLAN [OPTION...]: builds a TensorRT engine of an exported folder for this machine's GPU, saves it as PLAN, and times
# its two profiles: prefill of 128 tokens, and one token. Where the model takes it (its metadata says past_present_share_buffer), the cache
# has 1,536 slots whatever is filled; else one token comes after 1,024.
set -euo pipefail
model=${1:?usage: run.sh FOLDER PLAN [OPTION...]}/model.onnx plan=${2:?usage: run.sh FOLDER PLAN [OPTION...]} && shift 2
library=$(python -c 'import quantmoe; print(quantmoe.trt_library_path())')
lines=$(python - "$model" <<'PYTHON'
import sys
import onnx
model = onnx.load(sys.argv[1], load_external_data=False)
fixed = {p.key: p.value for p in model.metadata_props}.get("past_present_share_buffer") == "true"
caches = {v.name: v.type.tensor_type.shape.dim for v in model.graph.input if v.name.startswith("past_key_values")}
for new, past in ((1, 0), (128, 0), (512, 1024), (1, 1024), (1, 1535)):
    past, total = (1536, 1536) if fixed else (past, past + new)
    shapes = [f"input_ids:1x{new}", f"position_ids:1x{new}", f"attention_mask:1x{total}"]
    print(",".join(shapes + [f"{name}:1x{d[1].dim_value}x{past}x{d[3].dim_value}" for name, d in caches.items()]))
PYTHON
)
{ read -r least && read -r prefill && read -r most && read -r decode && read -r last; } <<<"$lines"
trtexec --onnx="$model" --staticPlugins="$library" --stronglyTyped --saveEngine="$plan" \
  --profile=0 --minShapes="$least" --optShapes="$prefill" --maxShapes="$most" \
  --profile=1 --minShapes="$least" --optShapes="$decode" --maxShapes="$last" \
  --useProfile=0 --shapes="$prefill" "$@"
trtexec --loadEngine="$plan" --staticPlugins="$library" --useProfile=1 --shapes="$decode" "$@"
