"""Whole checkpoints of which something is missing, damaged or absurd: refused before anything is traced or written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.checkpoints import TINY, make_checkpoint, write_checkpoint
from support.operators.specs import moe_spec

from quantmoe.custom_ops import native
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.exporter.reading.formats import CheckpointError, find_format, moe_layers, open_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("model"), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, **TINY
    )


def edited(model: Path, folder: Path, edit: Callable[[dict[str, Any], dict[str, np.ndarray]], Any]) -> Path:
    """A copy of a checkpoint with its config and tensors changed by ``edit``."""
    ckpt = open_checkpoint(model)
    config, tensors = json.loads(json.dumps(ckpt.config)), {name: ckpt.tensor(name).copy() for name in ckpt.names()}
    edit(config, tensors)
    quantization = config.pop("quantization_config")
    return write_checkpoint(folder, tensors, quantization, **config)


def route(tensors: dict[str, np.ndarray], count: int) -> None:
    """Make routers choose from so many experts. Where these are all experts, config.json need not count them."""
    for name in (name for name in tensors if name.endswith("mlp.gate.weight")):
        tensors[name] = np.resize(tensors[name], (count, tensors[name].shape[1]))


E1 = "model.layers.1.mlp.experts.1"
EDITS: dict[str, tuple[Callable[[dict[str, Any], dict[str, np.ndarray]], Any], str | None]] = {
    "missing expert": (
        lambda c, t: [t.pop(name) for name in list(t) if name.startswith(f"{E1}.")],
        "model.layers.1.mlp.experts lacks the experts [1]; config.json says 4",
    ),
    "missing projection": (
        lambda c, t: [t.pop(name) for name in list(t) if name.startswith(f"{E1}.up_proj.")],
        f"{E1}.up_proj is missing or not quantized",
    ),
    "one expert not quantized": (
        lambda c, t: (
            [t.pop(name) for name in list(t) if name.startswith(f"{E1}.up_proj.")],
            t.update({f"{E1}.up_proj.weight": np.zeros((64, 128), np.float32)}),
        ),
        f"{E1}.up_proj is missing or not quantized",
    ),
    "no gates in a layer": (
        lambda c, t: [t.pop(name) for name in list(t) if "layers.1" in name and "experts" in name and "gate_" in name],
        "model.layers.0.mlp.experts has a gate, model.layers.1.mlp.experts has no gate; expected one kind",
    ),
    "more experts in config and routers": (
        lambda c, t: (c.update(num_experts=5), route(t, 5)),
        "lacks the experts [4]; config.json says 5",
    ),
    "fewer experts in config and routers": (
        lambda c, t: (c.update(num_experts=3), route(t, 3)),
        "has 4 experts; config.json says 3",
    ),
    "no number of experts": (
        lambda c, t: (c.pop("num_experts", 0), c.pop("num_local_experts", 0), route(t, 5)),
        "expected one of the fields num_experts",
    ),
    "hidden size a string": (lambda c, t: c.update(hidden_size="128"), "hidden_size is '128', expected a positive int"),
    "another hidden size": (lambda c, t: c.update(hidden_size=96), "is [64, 128], expected [64, 96] (config.json)"),
    "a trillion experts": (
        lambda c, t: c.update(num_experts=10**12),
        "num_experts is 1000000000000, expected at most 16777216",
    ),
    "an expert's number of 5000 digits": (
        lambda c, t: t.update({f"model.layers.1.mlp.experts.{'9' * 5000}.x.y": np.zeros(1)}),
        None,
    ),
    "a millionth expert": (
        lambda c, t: t.update({"model.layers.1.mlp.experts.999999.up_proj.weight_packed": np.zeros(1)}),
        "has 5 experts; config.json says 4",
    ),
    "a layer of that number": (
        lambda c, t: t.update({f"model.layers.{'9' * 5000}.mlp.experts.0.x.y": np.zeros(1)}),
        "lacks the experts [1, 2, 3]",
    ),
    "unknown activation": (lambda c, t: c.update(hidden_act="mish"), "activation 'mish'; supported: silu"),
    "missing scale": (
        lambda c, t: t.pop(f"{E1}.down_proj.weight_scale"),
        f"{E1}.down_proj.weight_scale is missing, expected BF16|F16|F32 [128, 2]",
    ),
    "transposed scale": (
        lambda c, t: t.update({f"{E1}.down_proj.weight_scale": t[f"{E1}.down_proj.weight_scale"].T}),
        f"{E1}.down_proj.weight_scale is BF16 [2, 128], expected BF16|F16|F32 [128, 2] (compressed-tensors)",
    ),
    "wrong weight_shape": (
        lambda c, t: t.update({f"{E1}.down_proj.weight_shape": np.array([-1, 64])}),
        f"{E1}.down_proj.weight_shape is [-1, 64], expected positive sizes",
    ),
    "huge weight_shape": (
        lambda c, t: t.update({f"{E1}.down_proj.weight_shape": np.array([2**40, 2**40])}),
        f"{E1}.down_proj.weight_packed is I32 [128, 8], expected I32 [1099511627776",
    ),
    "other experts only": (
        lambda c, t: [t.update({name.replace("experts", "wizards"): t.pop(name)}) for name in list(t)],
        "no experts; expected tensors named <layer>.experts.<number>.*",
    ),
    "experts of another kind": (
        lambda c, t: (
            [t.pop(name) for name in list(t) if "experts" in name]
            + [t.update({f"{E1[:-2]}.w12": np.zeros((4, 3, 2), np.float16)})]
        ),
        "model.safetensors: model.layers.1.mlp.experts.w12 F16 [4, 3, 2]",
    ),
    "experts of another name": (
        lambda c, t: (
            [t.pop(name) for name in list(t) if "experts" in name]
            + [t.update({"model.layers.1.block_sparse_moe.input_linear.weight": np.zeros((4, 3, 2), np.float16)})]
        ),
        "block_sparse_moe.input_linear.weight F16 [4, 3, 2]",
    ),
    "an expert with other activations": (
        lambda c, t: c["quantization_config"]["config_groups"].update(
            other=c["quantization_config"]["config_groups"]["group_0"]
            | {
                "targets": [f"{E1}.up_proj"],
                "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
            }
        ),
        f"{E1}.up_proj quantizes activations as int8_token, {E1}.gate_proj as none; expected one way in both",
    ),
    "no group targets the experts": (
        lambda c, t: c["quantization_config"]["config_groups"]["group_0"].update(targets=["re:.*q_proj"]),
        "has quantized tensors but no config group targets it",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_model(name: str, model: Path, tmp_path: Path) -> None:
    edit, text = EDITS[name]
    folder = edited(model, tmp_path, edit)
    if text is None:  # no such expert: not one of the model's tensors
        assert len(moe_layers(find_format(open_checkpoint(folder)))) == 2
        return
    with pytest.raises(CheckpointError) as error:
        [list(layer) for layer in moe_layers(find_format(open_checkpoint(folder)))]
    assert text in str(error.value)
    assert str(folder) in str(error.value)


LAST = "model.layers.1.mlp.experts.3.down_proj"
DAMAGE: dict[str, tuple[Callable[[dict[str, Any], dict[str, np.ndarray]], Any], str]] = {
    "a billion labels": (
        lambda c, t: c.update(num_labels=10**9),
        "num_labels is 1000000000, expected at most 65536",
    ),
    "a text_config that is a name": (lambda c, t: c.update(text_config="x"), "config.json"),
    "an endless regular expression": (
        lambda c, t: c["quantization_config"]["config_groups"]["group_0"].update(
            targets=["re:(([a-z]|[a-z0-9_.])+)+!$"]
        ),
        "no config group targets it",  # re itself would take years
    ),
    "integers that nothing says are quantized": (
        lambda c, t: t.update({"model.norm.weight": np.ones(128, np.int8)}),
        "model.norm.weight is I8, expected BF16, F16, F32",
    ),
    "a generation_config that is a list": (
        lambda c, t: None,
        "generation_config.json: expected a JSON object, found list",
    ),
    "no gates at all": (
        lambda c, t: [t.pop(name) for name in list(t) if "experts" in name and "gate_proj" in name],
        "model.layers.0.mlp.experts (Qwen3MoeExperts) has a gate, the checkpoint's model.layers.0.mlp.experts has "
        "up_proj, down_proj for each expert",
    ),
    "missing": (lambda c, t: t.pop(f"{LAST}.weight_shape"), f"{LAST}.weight_shape is missing, expected I64"),
    "dtype": (
        lambda c, t: t.update({f"{LAST}.weight_packed": t[f"{LAST}.weight_packed"].view(np.uint32)}),
        f"{LAST}.weight_packed is U32 [128, 8], expected I32 [128, 8]",
    ),
    "shape": (
        lambda c, t: t.update({f"{LAST}.weight_packed": t[f"{LAST}.weight_packed"][:-1]}),
        f"{LAST}.weight_packed is I32 [127, 8], expected I32 [128, 8]",
    ),
    "a norm": (
        lambda c, t: t.update({"model.norm.weight": t["model.norm.weight"][1:]}),
        "model.norm.weight has shape [127], expected [128]",
    ),
    "a quantized linear outside the experts": (
        lambda c, t: t.pop("model.layers.1.self_attn.k_proj.weight_scale"),
        "model.layers.1.self_attn.k_proj.weight_scale is missing",
    ),
}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_scales_that_are_no_numbers(projection: str, value: float, model: Path, tmp_path: Path) -> None:
    """Refused before a byte of that expert is written."""
    name = f"{E1}.{projection}.weight_scale"
    folder = edited(model, tmp_path, lambda c, t: t[name].flat.__setitem__(5, value))
    layer = moe_layers(find_format(open_checkpoint(folder)))[1]
    layout = LAYOUTS["cpu_panel"]
    w13, w2 = layout.describe(layer.expert(0), "none")
    spec = moe_spec(4, layer.hidden_size, layer.intermediate_size, w13, w2)
    rows = [native.aligned(layout.row_bytes(spec, p)) for p in ("w13", "w2")]
    layout.pack(layer.expert(0), spec, *rows)
    role = projection.removesuffix("_proj")
    with pytest.raises(ValueError, match=f"{role}: scales that are NaN or infinite"):
        layout.pack(layer.expert(1), spec, *rows)


@pytest.mark.parametrize("dense", ["quantmoe", "ort"])
def test_a_linears_scales_that_are_no_numbers(dense: str, model: Path, tmp_path: Path) -> None:
    """Also where ONNX Runtime's MatMulNBits would have taken them as they are."""
    from quantmoe.exporter.writing import convert

    name = "model.layers.1.self_attn.k_proj.weight_scale"
    folder = edited(model, tmp_path / "damaged", lambda c, t: t[name].flat.__setitem__(5, np.nan))
    text = r"damaged: model\.layers\.1\.self_attn\.k_proj: scales that are NaN or infinite"
    with pytest.raises(CheckpointError, match=text):
        convert.export(folder, tmp_path / "out", dense=dense, activations="float")
    assert not (tmp_path / "out").exists()


def test_negative_scales_are_kept(model: Path, tmp_path: Path) -> None:
    """AutoRound writes them: a code of -8 and a negative scale reach one step further up."""
    name = f"{E1}.up_proj.weight_scale"
    folder = edited(model, tmp_path, lambda c, t: t.update({name: -t[name]}))
    whole, flipped = (
        moe_layers(find_format(open_checkpoint(path)))[1].expert(1).up.dequantize() for path in (model, folder)
    )
    np.testing.assert_array_equal(flipped, -whole)


SIZES = {
    "hidden_size": (2**40, "hidden_size is 1099511627776, expected at most 16777216"),
    "moe_intermediate_size": (2**62, "moe_intermediate_size is 4611686018427387904, expected at most"),
    "num_hidden_layers": (10**7, "num_hidden_layers is 10000000, the checkpoint has tensors of 2 layers"),
    "num_attention_heads": (2**31, "num_attention_heads is 2147483648, expected at most"),
    "num_key_value_heads": (0, "config.json: not "),
    "head_dim": (2**40, "head_dim is 1099511627776, expected at most"),
    "vocab_size": (2**50, "vocab_size is 1125899906842624, expected at most"),
    "num_experts_per_tok": (10**9, "1000000000 experts a token, expected at most 4"),
    "num_experts": (2**60, "expected at most 16777216"),
    "auto_map": (
        {"AutoConfig": "run.Config", "AutoModelForCausalLM": "run.Model"},
        "code of the checkpoint, which is never run",
    ),
    "model_type": ("never_heard_of", "not an architecture of transformers"),
    "rope_scaling": ("?", "config.json: not "),
    "layer_types": (7, "config.json: not "),
}


def test_absurd_configurations(model: Path, tmp_path: Path) -> None:
    """One process with 4 GB of address space beyond torch's libraries; every size is refused, and no code is run."""
    for key, (value, _) in SIZES.items():
        folder = edited(model, tmp_path / key, lambda c, t, key=key, value=value: c.update({key: value}))
        (folder / "run.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
        if key == "auto_map":
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            (folder / "config.json").write_text(json.dumps(config | {"model_type": "never_heard_of"}), encoding="utf-8")
    code = """
import re, resource, sys
from pathlib import Path
from quantmoe.exporter.reading.formats import CheckpointError, find_format, open_checkpoint
from quantmoe.exporter.graph.model import Skeleton
used = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30),) * 2)
for folder in sys.argv[1:]:
    try:
        Skeleton(find_format(open_checkpoint(folder)))
        print("accepted")
    except CheckpointError as error:
        print(str(error).replace(chr(10), " "))
"""
    folders = [str(tmp_path / key) for key in SIZES]
    done = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for (key, (_, text)), line in zip(SIZES.items(), done.stdout.splitlines(), strict=True):
        assert text in line, (key, line)
        assert "trust_remote_code" not in line
    assert not (tmp_path / "ran").exists()


def test_a_gguf_file_without_gates(tmp_path: Path) -> None:
    """Which would be exported as another model's ungated experts."""
    from quantmoe.exporter.writing import convert
    from quantmoe.exporter.writing.plan import plan

    whole = Path(__file__).parents[1] / "fixtures" / "gguf" / "qwen3moe-Q4_0.gguf"
    text = whole.read_bytes()
    path = tmp_path / "model.gguf"
    # tensors of layers beyond the last are left out
    layers = moe_layers(find_format(open_checkpoint(whole)))
    for layer in layers:
        name = f"blk.{layer.index}.ffn_gate_exps.weight".encode()
        assert text.count(name) == 1
        text = text.replace(name, f"blk.{layer.index + 7}.ffn_gate_exps.weight".encode())
    path.write_bytes(text)
    for refuse in (convert.export, plan):
        with pytest.raises(CheckpointError, match=r"Qwen3MoeExperts\) has a gate, .* has up_proj, down_proj for each"):
            refuse(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_before_tracing(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantmoe.exporter.writing import convert
    from quantmoe.exporter.writing.plan import plan

    monkeypatch.setattr(
        "quantmoe.exporter.writing.graph_writer.trace", lambda *_, **__: pytest.fail("traced a damaged checkpoint")
    )
    edit, text = DAMAGE[name]
    folder = edited(model, tmp_path / "damaged", edit)
    if "generation_config" in name:
        (folder / "generation_config.json").write_text("[]", encoding="utf-8")
    for refuse in (convert.export, plan):
        with pytest.raises(CheckpointError) as error:
            refuse(folder, tmp_path / "out")
        assert text in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["truncated", "overwritten at the end"])
def test_a_shard_that_changes_during_the_export(
    change: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a signal of the mapped file's, nor weights of two models."""
    from quantmoe.exporter.writing import convert

    folder = edited(model, tmp_path / "damaged", lambda c, t: None)
    shard = folder / "model.safetensors"
    whole = shard.read_bytes()
    if change == "truncated":
        pack = LAYOUTS["cpu_panel"].pack

        def cut(*arguments: Any) -> None:
            pack(*arguments)
            os.truncate(shard, 4096)

        monkeypatch.setattr(LAYOUTS["cpu_panel"], "pack", cut)
        text = rf"model\.safetensors: changed while it was read: it has 4096 bytes, and had {len(whole)}; export again"
    else:
        end = bytes([whole[-1] ^ 1])
        monkeypatch.setattr(convert, "_companions", lambda *_: shard.write_bytes(whole[:-1] + end))
        text = r"model\.safetensors: changed while it was read: its time of modification is another; export again"
    with pytest.raises(CheckpointError, match=text):
        convert.export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_weight_outside_the_experts_that_is_no_number(model: Path, tmp_path: Path) -> None:
    from quantmoe.exporter.graph.model import Skeleton

    def edit(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)

    skeleton = Skeleton(find_format(open_checkpoint(edited(model, tmp_path, edit))))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has values that are not finite"):
        [make() for make in skeleton.blocks("model.norm.weight", False, np.dtype(np.float32))]
