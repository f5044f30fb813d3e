"""A configuration never has transformers fetch code: a stand-in for the package kernels is never called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.models.checkpoints import TINY, make_checkpoint, write_checkpoint
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from quantmoe.exporter.reading.formats import open_checkpoint

REPOSITORY = "someone/code@main"
#: fields of config.json -> what of them is refused; None: nothing is
FIELDS: dict[str, tuple[dict[str, Any], str | None]] = {
    "attention": ({"attn_implementation": REPOSITORY}, "attn_implementation is 'someone/code@main'"),
    "inner": ({"_attn_implementation": "kernels-community/flash-attn2"}, "_attn_implementation is 'kernels-community"),
    "experts": ({"experts_implementation": REPOSITORY}, "experts_implementation is 'someone/code@main'"),
    "by part": ({"attn_implementation": {"": "sdpa", "text_config": REPOSITORY}}, "attn_implementation.text_config is"),
    "nested": (
        {"text_config": {"sub": [{"_experts_implementation": REPOSITORY}]}},
        "text_config.sub.0._experts_implementation is",
    ),
    "unknown": ({"attn_implementation": "mine"}, "attn_implementation is 'mine'"),
    "ours": ({"attn_implementation": "quantmoe_cached"}, "attn_implementation is 'quantmoe_cached'"),
    "a number": ({"attn_implementation": 7}, "attn_implementation is 7"),
    # transformers takes kernels of the hub where the package flash_attn is not installed
    "flash": ({"attn_implementation": "flash_attention_2", "_attn_implementation_autoset": True}, None),
    "plain": ({"attn_implementation": None, "experts_implementation": "grouped_mm"}, None),
}
KERNELS = """
import os
def get_kernel(*names, **_):
    open(os.environ["CALLED"], "a").write(f"{names}")
    raise FileNotFoundError
def use_kernel_forward_from_hub(_): return lambda kind: kind
def use_kernelized_func(*_): return lambda kind: kind
class Other:
    def __init__(self, *_, **__): pass
    def __getattr__(self, _): return Other()
    def __call__(self, *_, **__): return Other()
def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    return Other()
"""
CODE = """
import sys
from transformers.utils.import_utils import is_kernels_available
from quantmoe.exporter.graph.model import Skeleton
from quantmoe.exporter.reading.formats import CheckpointError, find_format, open_checkpoint
assert is_kernels_available()
for folder in sys.argv[1:]:
    try:
        model = Skeleton(find_format(open_checkpoint(folder))).model
        print(model.config._attn_implementation, model.config._experts_implementation)
    except CheckpointError as error:
        print(str(error).replace(chr(10), " "))
"""


def test_kernels_of_the_hub_are_never_asked_for(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    (packages / "kernels").mkdir(parents=True)
    (packages / "kernels/__init__.py").write_text(KERNELS, encoding="utf-8")
    information = packages / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n", encoding="utf-8"
    )
    source = make_checkpoint(
        tmp_path / "source", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, **TINY
    )
    ckpt = open_checkpoint(source)
    config = {key: value for key, value in ckpt.config.items() if key != "quantization_config"}
    tensors = {name: ckpt.tensor(name) for name in ckpt.names()}
    folders = []
    for name, (fields, _) in FIELDS.items():
        nested = {"text_config": config | fields["text_config"]} if "text_config" in fields else fields
        folders.append(write_checkpoint(tmp_path / name, tensors, ckpt.quantization, **config | nested))
        assert json.loads((folders[-1] / "config.json").read_text(encoding="utf-8")).items() >= nested.items()
    called = tmp_path / "called"
    done = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, folders)],
        env=os.environ | {"CALLED": str(called), "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert not called.exists(), called.read_text(encoding="utf-8")
    for (name, (_, text)), line in zip(FIELDS.items(), done.stdout.splitlines(), strict=True):
        want = f"config.json: {text}" if text else "eager eager"
        assert want in line, (name, line)
        assert text is None or "which is no part of transformers: no code is fetched" in line
