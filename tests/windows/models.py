"""`models.py OUT`: layers of support/operators/cases.py as models with inputs, and damaged ones, for run_models.cc."""

import shutil
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.models.one_layer import write_model
from support.operators.cases import CASES

FLOAT, INT64 = 1, 7


def write(folder: Path, layer: object, tokens: tuple[np.ndarray, ...], **changes: object) -> Path:
    """A model of one layer; its inputs are in files of their names, and `inputs` lists names, types and shapes."""
    folder.mkdir(parents=True)
    write_model(folder / "model.onnx", layer.spec, layer.w13, layer.w2, **changes)
    lines = []
    for name, array in zip(("x", "ids", "weights"), tokens, strict=True):
        array = np.ascontiguousarray(array, np.int64 if name == "ids" else np.float32)
        (folder / name).write_bytes(array.tobytes())
        lines.append(f"{name} {INT64 if name == 'ids' else FLOAT} {' '.join(map(str, array.shape))}\n")
    (folder / "inputs").write_text("".join(lines), newline="\n", encoding="utf-8")
    return folder


out = Path(sys.argv[1])
for index, case in enumerate(CASES):
    layer = case.build()
    write(out / f"case{index:03}", layer, case.tokens(19))
case = CASES[0]
layer, tokens = case.build(), case.tokens(3)
write(out / "damaged_attribute", layer, tokens, attributes={"hidden_size": -4})
write(out / "damaged_enum", layer, tokens, attributes={"w13_format": "int99"})
x, ids, weights = tokens
write(out / "damaged_id", layer, (x, ids + 1000, weights))
whole = write(out / "damaged_data", layer, tokens)
data = whole / "model.bin"
data.write_bytes(data.read_bytes()[:-64])
for name, size in (("damaged_model", 100), ("damaged_empty", 0)):
    model = Path(shutil.copytree(out / "case000", out / name)) / "model.onnx"
    model.write_bytes(model.read_bytes()[:size])
(Path(shutil.copytree(out / "case000", out / "damaged_missing")) / "model.bin").unlink()
