"""Hypothesis on the path from untrusted files to packed experts: a CheckpointError, a ModelError, or a result.

    python tests/fuzz/checkpoint.py SECONDS [SEED]

Each example damages one thing: a piece of a shard or of a GGUF file, a field of its header or of config.json, a tensor,
or a piece of an exported model. A failure is printed with the example that hypothesis shrank; executions at the end. A
SEED other than 0 gives the same examples each time.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))
from hostile.test_exported import one_layer_model
from support.models.checkpoints import TINY, make_checkpoint, make_gptq_checkpoint, write_checkpoint
from support.models.encoders import CASES, random_matrix

from quantmoe.custom_ops import native
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.exporter.choosing.choose import choose_layer
from quantmoe.exporter.graph.model import Skeleton
from quantmoe.exporter.inspecting.inspect import ModelError, inspect
from quantmoe.exporter.reading.formats import CheckpointError, find_format, moe_layers, open_checkpoint

GGUF = [Path(__file__).parents[1] / "fixtures" / "gguf" / f"qwen3moe-{name}.gguf" for name in ("Q4_0", "Q5_K_M")]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 300)
    | st.integers(2**31 - 1, 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["group", "int", "re:(", "../x", "silu", "float32"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


def paths(value: Any, at: tuple = ()) -> list[tuple]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at] * bool(at) + [p for key, v in inner for p in paths(v, (*at, key))]


def replaced(data: st.DataObject, value: Any) -> Any:
    """A copy with one value, anywhere in it, replaced or removed."""
    out = json.loads(json.dumps(value))
    path = data.draw(st.sampled_from(paths(out)))
    at = out
    for key in path[:-1]:
        at = at[key]
    if data.draw(st.booleans()):
        at[path[-1]] = data.draw(VALUES)
    else:
        del at[path[-1]]
    return out


def damaged(data: st.DataObject, content: bytes) -> bytes:
    """Cut, or some bytes overwritten, inserted or taken out."""
    at = data.draw(st.integers(0, max(0, len(content) - 1)))
    piece = data.draw(st.binary(max_size=9))
    taken = data.draw(st.sampled_from([0, len(piece), 1, 8, len(content)]))
    return content[:at] + piece + content[at + taken :]


def read(folder: Path) -> None:
    """What export reads and computes before it traces."""
    format = find_format(open_checkpoint(folder))
    layers = moe_layers(format)
    for layer in layers:
        spec = choose_layer(layer, "cpu_panel", "int8")
        rows = [native.aligned(LAYOUTS["cpu_panel"].row_bytes(spec, p)) for p in ("w13", "w2")]
        for expert in layer:
            with suppress(ValueError):  # as convert does, which adds the expert's name
                LAYOUTS["cpu_panel"].pack(expert, spec, *rows)
    for name in format.parameters():
        format.stored(name)


class Fuzz:
    def __init__(self, folder: Path) -> None:
        small = TINY | {"num_hidden_layers": 1, "hidden_size": 64, "head_dim": 16, "vocab_size": 384}
        sizes = small | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
        self.checkpoints = [
            make_checkpoint(folder / "ct", **sizes),
            make_checkpoint(folder / "w8a8", scheme="W8A8", **sizes),
            make_gptq_checkpoint(folder / "gptq", desc_act=True, **sizes),
        ]
        self.model = one_layer_model(folder / "model")
        self.work = folder / "work"
        self.work.mkdir()

    def checkpoint(self, data: st.DataObject) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        folder = shutil.copytree(data.draw(st.sampled_from(self.checkpoints)), self.work)
        shard, config = next(folder.glob("*.safetensors")), folder / "config.json"
        content = shard.read_bytes()
        length = int.from_bytes(content[:8], "little")
        match data.draw(st.sampled_from(["header", "bytes", "header bytes", "config", "config bytes", "model"])):
            case "header":
                text = json.dumps(replaced(data, json.loads(content[8 : 8 + length]))).encode()
                shard.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
            case "bytes":
                shard.write_bytes(damaged(data, content))
            case "header bytes":
                text = damaged(data, content[8 : 8 + length])
                shard.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
            case "config bytes":
                config.write_bytes(damaged(data, config.read_bytes()))
            case kind:
                config.write_text(
                    json.dumps(replaced(data, json.loads(config.read_text(encoding="utf-8")))), encoding="utf-8"
                )
                if kind == "model":
                    with suppress(CheckpointError):
                        Skeleton(find_format(open_checkpoint(folder)))
        with suppress(CheckpointError):
            read(folder)

    def matrix(self, data: st.DataObject) -> None:
        """Every encoder's tensors, one of them of another type or shape or with other values."""
        case = data.draw(st.sampled_from(CASES))
        group_size = data.draw(st.sampled_from(case.group_sizes))
        matrix = random_matrix(case, 16, 128, group_size, case.scales[0], bias=data.draw(st.booleans()), seed=0)
        tensors = {f"m.{k}": v for k, v in case.encode(matrix).items()}
        name = data.draw(st.sampled_from(sorted(tensors)))
        array = tensors[name]
        match data.draw(st.integers(0, 3)):
            case 0:
                raw = bytearray(array.tobytes())
                for _ in range(data.draw(st.integers(1, 8))):
                    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
                tensors[name] = np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)
            case 1:
                tensors[name] = array.reshape(-1)[: data.draw(st.integers(0, array.size))]
            case 2:
                tensors[name] = array.view(np.uint8) if array.ndim else array[None]
            case 3:
                del tensors[name]
        folder = write_checkpoint(self.work / "matrix", tensors, case.config(group_size))
        with suppress(CheckpointError):
            found = find_format(open_checkpoint(folder)).matrix("m")
            found.dequantize()

    def gguf(self, data: st.DataObject) -> None:
        content = data.draw(st.sampled_from(GGUF)).read_bytes()
        header = data.draw(st.sampled_from([64, 2048, 20000]))  # the tokenizer takes most of it
        path = self.work / "model.gguf"
        path.write_bytes(damaged(data, content[:header]) + content[header:])
        with suppress(CheckpointError):
            read(path)

    def exported(self, data: st.DataObject) -> None:
        folder = self.work / "exported"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.model, folder)
        path = folder / data.draw(st.sampled_from(["model.onnx", "model.onnx", "model.bin"]))
        path.write_bytes(damaged(data, path.read_bytes()))
        with suppress(ModelError):
            inspect(folder, verify=True)


def main(seconds: float, first: int = 0) -> None:
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(Path(folder))
        runs = dict.fromkeys(("checkpoint", "matrix", "gguf", "exported"), 0)

        def rounds(name: str, number: int) -> None:
            @seed(number)
            @settings(
                max_examples=100, deadline=None, database=None, derandomize=False,
                suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
            )  # fmt: skip
            @given(st.data())
            def body(data: st.DataObject) -> None:
                runs[name] += 1
                getattr(fuzz, name)(data)

            body()

        for number in itertools.count(first << 32 or random.getrandbits(64)):
            if time.monotonic() > end:
                break
            for name in runs:
                rounds(name, number)
    print("fuzz checkpoint: " + ", ".join(f"{count} {name}" for name, count in runs.items()) + " executions")


if __name__ == "__main__":
    main(float(sys.argv[1]), *map(int, sys.argv[2:]))
