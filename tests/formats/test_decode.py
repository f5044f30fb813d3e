"""decode(encode(matrix)) is the matrix, bit for bit, for every row of the table; damaged tensors are named."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.checkpoints import same_matrix, write_checkpoint
from support.models.encoders import CASES, Case, awq, bit_stream, gptq, random_matrix

from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.exporter.reading.formats import CheckpointError, find_format, moe_layers, open_checkpoint
from quantmoe.exporter.surveying.survey import survey
from quantmoe.exporter.writing.prepare import open_format

FIXTURES = Path(__file__).parents[1] / "fixtures"
BY_ID = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def write(
    folder: Path, case: Case, matrix: QuantizedMatrix, changes: dict[str, np.ndarray | None] | None = None
) -> Path:
    tensors = case.encode(matrix) | (changes or {})
    return write_checkpoint(
        folder, {f"m.{k}": v for k, v in tensors.items() if v is not None}, case.config(matrix.group_size)
    )


@BY_ID
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_round_trip(case: Case, data: st.DataObject) -> None:
    n = case.n_step * data.draw(st.integers(1, 80 // case.n_step), "n / step")
    k = case.k_step * data.draw(st.integers(1, 300 // case.k_step), "k / step")
    group_size = data.draw(st.sampled_from(case.group_sizes), "group size")
    scale = data.draw(st.sampled_from(case.scales), "scale")
    seed, bias = data.draw(st.integers(0, 2**32 - 1), "seed"), data.draw(st.booleans(), "bias")
    want = random_matrix(case, n, k, group_size, scale, bias, seed)
    with tempfile.TemporaryDirectory() as folder:
        found = find_format(open_checkpoint(write(Path(folder), case, want))).matrix("m")
        same_matrix(found, want)


@pytest.mark.parametrize("column", [False, True], ids=["row", "column"])
@pytest.mark.parametrize("rounded", [True, False])
def test_fused_experts_of_fbgemm(column: bool, rounded: bool, tmp_path: Path) -> None:
    """Llama-4's, as transformers' FbgemmFp8Llama4TextExperts multiplies them; or left in bf16."""
    config = json.loads((FIXTURES / "modelopt-fp8-llama4" / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    name, rng, (e, k, i) = "model.layers.0.feed_forward.experts", np.random.default_rng(0), (2, 64, 96)
    dtype = ml_dtypes.float8_e4m3fn if rounded else ml_dtypes.bfloat16
    weights = {leaf: rng.normal(0, 16, shape).astype(dtype)
               for leaf, shape in (("gate_up_proj", (e, k, 2 * i)), ("down_proj", (e, i, k)))}  # fmt: skip
    scales = {f"{leaf}_scale": rng.uniform(0.5, 2, (e, 1, w.shape[2])).astype(np.float32)
              for leaf, w in weights.items() if rounded}  # fmt: skip
    dense = {leaf: w.astype(np.float32) * scales.get(f"{leaf}_scale", np.float32(1)) for leaf, w in weights.items()}
    if column and rounded:
        scales["down_proj_scale"] = scales["down_proj_scale"].transpose(0, 2, 1)
    tensors = {f"{name}.{leaf}": np.ascontiguousarray(array) for leaf, array in (weights | scales).items()}
    format = find_format(open_checkpoint(write_checkpoint(tmp_path, tensors, {"quant_method": "fbgemm_fp8"}, **config)))
    (layer,) = moe_layers(format)
    assert layer.scheme.activation_format == ("fp8_token" if rounded else "none")
    for at, expert in enumerate(layer):
        gate, up = np.split(dense["gate_up_proj"][at], 2, axis=1)
        for matrix, want in zip((expert.gate, expert.up, expert.down), (gate, up, dense["down_proj"][at]), strict=True):
            np.testing.assert_array_equal(matrix.dequantize(np.float32), want.T)
    for leaf in scales:
        kept = {name_: array for name_, array in tensors.items() if not name_.endswith(leaf)}
        folder = write_checkpoint(tmp_path / leaf, kept, {"quant_method": "fbgemm_fp8"}, **config)
        with pytest.raises(CheckpointError, match=rf"{leaf} is missing, expected BF16.F16.F32 \[2, 1, \d+\]"):
            moe_layers(find_format(open_checkpoint(folder)))[0].expert(0)


@pytest.mark.parametrize("storage", ["pack-quantized", "int-quantized"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7])
def test_other_bits_of_compressed_tensors(bits: int, symmetric: bool, storage: str, tmp_path: Path) -> None:
    """The library's own packing: codes that straddle words, and columns and rows that fill none."""
    rng, (n, k, g), top = np.random.default_rng(bits), (37, 96, 32), 1 << (bits - 1)
    values, zeros = (torch.from_numpy(rng.integers(-top, top, shape, np.int8)) for shape in ((n, k), (n, k // g)))
    scales = rng.uniform(0.5, 1, (n, k // g)).astype(np.float32)
    packed = storage == "pack-quantized"
    tensors = {"weight_scale": scales, "weight" if not packed else "weight_packed": values.numpy()}
    if packed:
        tensors |= {"weight_packed": pack_to_int32(values, bits).numpy(), "weight_shape": np.array([n, k])}
    if not symmetric:
        tensors["weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0).numpy() if packed else zeros.numpy()
    weights = {"num_bits": bits, "group_size": g, "symmetric": symmetric, "strategy": "group"}
    config = {"quant_method": "compressed-tensors", "format": storage, "config_groups": {"g": {"targets": ["Linear"]}}}
    config["config_groups"]["g"]["weights"] = weights
    format = find_format(open_checkpoint(write_checkpoint(tmp_path, {f"m.{k}": v for k, v in tensors.items()}, config)))
    less = np.repeat(zeros.numpy(), g, axis=1).astype(np.float32) * (not symmetric)
    want = (values.numpy() - less) * np.repeat(scales, g, axis=1)
    for own in (False, True):
        carrier = format.with_widths(own)
        matrix, kind = carrier.matrix("m"), "int4" if bits < 4 else "int8"
        if own and bits < 7:
            kind = f"int{bits}"
        np.testing.assert_array_equal(matrix.dequantize(np.float32), want)
        assert (matrix.kind, carrier.outline().matrix("m").kind) == (kind, kind)
        wider = f", carried as {kind}: {kind[3:]} bits a code, packed they would be {bits}"
        assert carrier.scheme("m").text.endswith(wider) == (packed and kind in ("int4", "int8"))


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("bits", [2, 3])
def test_codes_of_2_and_3_bits(bits: int, v2: bool, tmp_path: Path) -> None:
    """Codes keep their width or are int4's, in act-order and with every zero point."""
    rng, (n, k, g) = np.random.default_rng(bits), (64, 128, 32)
    matrix = QuantizedMatrix(
        kind="int4",
        codes=rng.integers(0, 2**bits, (n, k), np.uint8),
        scales=rng.uniform(0.5, 1, (n, k // g)).astype(np.float16),
        group_size=g,
        zero_points=rng.integers(0, 2**bits, (n, k // g)).astype(np.uint8),
        perm=rng.permutation(k).astype(np.int32),
    )
    config = {"quant_method": "gptq", "bits": bits, "group_size": g, "sym": False, "desc_act": True}
    config["checkpoint_format"] = "gptq_v2" if v2 else "gptq"
    tensors = {f"m.{name}": array for name, array in gptq(matrix, v2, bits).items()}
    format = find_format(open_checkpoint(write_checkpoint(tmp_path, tensors, config)))
    np.testing.assert_array_equal(format.matrix("m").dequantize(), matrix.dequantize())
    assert f"carried as int4: 4 bits a code, packed they would be {bits}" in format.scheme("m").text
    own = format.with_widths(True)
    np.testing.assert_array_equal(own.matrix("m").dequantize(), matrix.dequantize())
    assert own.matrix("m").kind == own.scheme("m").format == f"int{bits}"
    assert "carried" not in own.scheme("m").text


def planes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return GPTQModel's gptq_p along the last axis: I32 [R, C bits / 32] of codes [R, C]."""
    widths = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}[bits]
    words, at = [], 0
    for width in widths:
        words.append(bit_stream(codes.reshape(-1, 32) >> at & (1 << width) - 1, width))
        at += width
    return np.concatenate(words, axis=1).reshape(len(codes), -1)


@pytest.mark.parametrize(
    ("packing", "bits"),
    [(packing, bits) for packing in ("gptq_p", "auto_round", "auto_round:auto_gptq") for bits in range(2, 9)]
    + [("auto_round:auto_awq", bits) for bits in range(4, 8)],
)
def test_packings_of_every_width(packing: str, bits: int, tmp_path: Path) -> None:
    """Weights are code minus zero point times scale, with every code, in the widths that a packing has."""
    rng, (n, k, g) = np.random.default_rng(bits), (64, 128, 32)
    codes, zeros = (rng.integers(0, 2**bits, shape, np.uint8) for shape in ((n, k), (n, k // g)))
    scales = rng.uniform(0.5, 1, (n, k // g)).astype(np.float16)
    config = {"quant_method": "auto-round", "packing_format": packing}
    pack, stored = bit_stream, zeros.T
    if packing == "gptq_p":
        pack, config = planes, {"quant_method": "gptq", "checkpoint_format": "gptq_p"}
    elif packing == "auto_round:auto_gptq":
        zeros = np.maximum(zeros, 1)  # AutoRound stores no less than 0
        stored = zeros.T - np.uint8(1)
    if packing == "auto_round:auto_awq":
        order = (np.arange(n).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]]).reshape(-1)
        tensors = {"qweight": bit_stream(codes.T[:, order], bits), "qzeros": bit_stream(zeros.T[:, order], bits)}
    else:
        tensors = {"qweight": np.ascontiguousarray(pack(codes, bits).T), "qzeros": pack(stored, bits)}
    tensors = {f"m.{name}": array for name, array in (tensors | {"scales": np.ascontiguousarray(scales.T)}).items()}
    config |= {"bits": bits, "group_size": g, "sym": False}
    format = find_format(open_checkpoint(write_checkpoint(tmp_path, tensors, config)))
    want = (codes - np.repeat(zeros, g, axis=1).astype(np.float32)) * np.repeat(scales, g, axis=1).astype(np.float32)
    for own in (format, format.with_widths(True)):
        found, outlined = own.matrix("m"), own.outline().matrix("m")
        np.testing.assert_array_equal(found.dequantize(np.float32), want)
        assert (outlined.kind, outlined.shape) == (found.kind, found.shape) == (own.scheme("m").format, (n, k))


@BY_ID
def test_damage_is_named(case: Case, tmp_path: Path) -> None:
    """Each tensor in turn missing, of another shape, of another type."""
    n, k = 16, 256
    matrix = random_matrix(case, n, k, max(case.group_sizes), case.scales[0], bias=True, seed=0)
    tensors = case.encode(matrix)
    for i, (suffix, array) in enumerate(tensors.items()):
        damages = {"shape": np.concatenate([np.atleast_1d(array)] * 2), "type": np.zeros(array.shape, np.int16)}
        if suffix not in case.optional:
            damages["missing"] = None
        for damage, changed in damages.items():
            folder = write(tmp_path / f"{damage}{i}", case, matrix, {suffix: changed})
            with pytest.raises(CheckpointError, match="m\\.") as error:
                find_format(open_checkpoint(folder)).matrix("m")
            # a changed size of one tensor shows as the other not fitting it: both are of module m
            assert "expected" in str(error.value) or "missing" in str(error.value), str(error.value)


@pytest.mark.parametrize("case", [c for c in CASES if c.perm], ids=lambda case: case.id)
@pytest.mark.parametrize("damage", ["range", "negative", "unequal"])
def test_wrong_group_index(case: Case, damage: str, tmp_path: Path) -> None:
    matrix = random_matrix(case, 16, 128, 32, "f16", bias=False, seed=1)
    tensors = case.encode(matrix)
    name = "g_idx" if "g_idx" in tensors else "weight_g_idx"
    wrong = tensors[name].copy()
    wrong[0] = {"range": 4, "negative": -1, "unequal": (wrong[0] + 1) % 4}[damage]
    with pytest.raises(CheckpointError, match=f"m.{name}.*expected"):
        find_format(open_checkpoint(write(tmp_path, case, matrix, {name: wrong}))).matrix("m")


def test_short_last_group_in_act_order(tmp_path: Path) -> None:
    case = next(c for c in CASES if c.id == "gptq4-desc_act")
    want = random_matrix(case, 8, 104, 32, "f16", bias=False, seed=2)
    same_matrix(find_format(open_checkpoint(write(tmp_path, case, want))).matrix("m"), want)


def middle_words(case: Case, n: int, groups: int) -> np.ndarray:
    return np.ascontiguousarray(bit_stream(np.full((groups, n), 1 << (int(case.kind[3:]) - 1)), int(case.kind[3:])).T)


#: symmetric weights -> zero points in the middle as their tool stores them, of n rows and so many groups
MIDDLES: dict[str, Callable[[Case, int, int], np.ndarray]] = {
    "ct-w4a16": middle_words,
    "ct-w8a16": middle_words,
    "ct-w4a16-g_idx": middle_words,
    "ct-w8a8": lambda case, n, groups: np.zeros((n, groups), np.int8),
    "ct-w4a8": lambda case, n, groups: np.zeros((n, groups), np.int8),
    "fp8-128x128": lambda case, n, groups: np.zeros((n, 1), np.int8),
    "modelopt-nvfp4": lambda case, n, groups: np.zeros((n, groups), ml_dtypes.float8_e4m3fn),
    "modelopt-w4a16-awq": lambda case, n, groups: np.zeros((n, groups), np.float32),
    "quark-mxfp4": lambda case, n, groups: np.zeros((n, groups), np.uint8),
}


@pytest.mark.parametrize("id", MIDDLES)
def test_zero_points_beside_symmetric_weights(id: str, tmp_path: Path) -> None:
    """The middle changes nothing; another one would change weights, so it is refused and never ignored."""
    case = next(c for c in CASES if c.id == id)
    want = random_matrix(case, 12, 256, min(g for g in case.group_sizes if g > 0), case.scales[0], bias=False, seed=9)
    zeros = MIDDLES[id](case, 12, want.scales.shape[1])
    same_matrix(
        find_format(open_checkpoint(write(tmp_path / "a", case, want, {"weight_zero_point": zeros}))).matrix("m"), want
    )
    zeros = zeros.copy()
    zeros.flat[-1] += 1
    folder = write(tmp_path / "b", case, want, {"weight_zero_point": zeros})
    with pytest.raises(
        CheckpointError, match=r"b/model\.safetensors.*m\.weight_zero_point has zero points that are not"
    ):
        find_format(open_checkpoint(folder)).matrix("m")


@pytest.mark.parametrize("storage", ["float-quantized", "mxfp8-quantized", "mxfp4-pack-quantized"])
def test_zero_points_beside_floats_of_compressed_tensors(storage: str, tmp_path: Path) -> None:
    packed = "pack" in storage
    weights = {"num_bits": 4 if packed else 8, "type": "float", "strategy": "group", "group_size": 32}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": storage,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    scales = np.ones((8, 2), np.float32) if storage == "float-quantized" else np.full((8, 2), 127, np.uint8)
    weight = {"m.weight_packed": np.zeros((8, 32), np.uint8)}
    tensors = weight if packed else {"m.weight": np.zeros((8, 64), ml_dtypes.float8_e4m3fn)}
    for value in (0, 1):
        zeros = np.full((8, 2), value, ml_dtypes.float8_e4m3fn)
        stored = tensors | {"m.weight_scale": scales, "m.weight_zero_point": zeros}
        format = find_format(open_checkpoint(write_checkpoint(tmp_path / str(value), stored, quantization)))
        if value == 0:
            assert format.matrix("m").zero_points is None
            continue
        with pytest.raises(CheckpointError, match=r"m\.weight_zero_point has zero points that are not the middle"):
            format.matrix("m")


@pytest.mark.parametrize("id", ["gptq4", "gptq8", "gptq4-v2", "awq", "quark-int4"])
def test_zero_points_of_weights_called_symmetric_are_used(id: str, tmp_path: Path) -> None:
    """These tools' kernels read the stored zero points whatever the configuration says."""
    case = next(c for c in CASES if c.id == id)
    asymmetric = dataclasses.replace(case, zero_points=True)
    want = random_matrix(asymmetric, 16, 64, 32, case.scales[0], bias=False, seed=10)
    tensors = case.encode(want)
    if id == "quark-int4":  # two's complement
        flipped = dataclasses.replace(want, zero_points=want.zero_points ^ 8)
        tensors["weight_zero_point"] = awq(flipped)["qzeros"]
    config = case.config(32) | ({"zero_point": False} if id == "awq" else {})
    folder = write_checkpoint(tmp_path, {f"m.{k}": v for k, v in tensors.items()}, config)
    same_matrix(find_format(open_checkpoint(folder)).matrix("m"), want)


def test_a_symmetry_that_is_no_boolean(tmp_path: Path) -> None:
    """The library reads "false" as false; it was read as true."""
    case = next(c for c in CASES if c.id == "ct-w4a16-asym")
    matrix = random_matrix(case, 8, 64, 32, "bf16", bias=False, seed=11)
    config = case.config(32)
    config["config_groups"]["group_0"]["weights"]["symmetric"] = "false"
    folder = write_checkpoint(tmp_path, {f"m.{k}": v for k, v in case.encode(matrix).items()}, config)
    with pytest.raises(CheckpointError, match="symmetric 'false', expected true or false"):
        find_format(open_checkpoint(folder))


def test_int4_in_bytes_out_of_range(tmp_path: Path) -> None:
    case = next(c for c in CASES if c.id == "ct-w4a8")
    matrix = random_matrix(case, 4, 32, 32, "bf16", bias=False, seed=3)
    wrong = np.full((4, 32), 8, np.int8)
    with pytest.raises(CheckpointError, match=r"m\.weight has values outside int4"):
        find_format(open_checkpoint(write(tmp_path, case, matrix, {"weight": wrong}))).matrix("m")


def test_fp8_semantics_inverse(tmp_path: Path) -> None:
    """GPTQModel stores the divisor and says so."""
    case = next(c for c in CASES if c.id == "fp8-128x128")
    matrix = random_matrix(case, 130, 200, 128, "f32", bias=False, seed=4)
    config = case.config(128) | {"weight_scale_semantics": "inverse"}
    write_checkpoint(tmp_path, {f"m.{k}": v for k, v in case.encode(matrix).items()}, config)
    found = find_format(open_checkpoint(tmp_path)).matrix("m")
    np.testing.assert_array_equal(found.scales, np.float32(1) / matrix.scales)


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
MIXED = {
    "quantized_layers": {"m": {"quant_algo": "FP8_BLOCK_SCALES", "group_size": 128}},
    "quant_algo": "MIXED_PRECISION",
}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.float8_e8m0fnu])
@pytest.mark.parametrize(
    ("quantization", "name", "activations"),
    [
        (BLOCKS, "weight_scale_inv", "fp8_group128"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_BLOCK_SCALES"}, "weight_scale_inv", "fp8_group128"),
        (
            {"quant_method": "modelopt", "quantization": MIXED},
            "weight_scale_inv",
            "fp8_group128",
        ),  # of a module's parent
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, "weight_scale", "none"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "weight_scale_inv", "none"),
    ],
)
def test_scales_of_blocks_under_all_their_names(quantization, name, activations, dtype, tmp_path: Path) -> None:
    """The same matrix; powers of two stored as e8m0 are the numbers that they are in float32."""
    case = next(c for c in CASES if c.id == "fp8-128x128")
    want = random_matrix(case, 300, 200, 128, "f32", bias=False, seed=11)
    want = dataclasses.replace(want, scales=np.exp2(np.round(np.log2(want.scales))).astype(np.float32))
    tensors = {f"m.p.{'weight' if key == 'weight' else name}": array for key, array in case.encode(want).items()}
    tensors[f"m.p.{name}"] = tensors[f"m.p.{name}"].astype(dtype)
    format = find_format(open_checkpoint(write_checkpoint(tmp_path, tensors, quantization)))
    same_matrix(format.matrix("m.p"), want)
    assert format.scheme("m.p").activation_format == activations
    assert format.outline().matrix("m.p").scales.dtype == np.float32
    wrong = tensors | {f"m.p.{name}": np.zeros((3, 3), dtype)}
    found = find_format(open_checkpoint(write_checkpoint(tmp_path / "wrong", wrong, quantization)))
    with pytest.raises(CheckpointError, match=rf"m\.p\.{name} is F.* \[3, 3\], expected BF16.*F8_E8M0 \[3, 2\]"):
        found.matrix("m.p")


def test_dynamic_rules(tmp_path: Path) -> None:
    """GPTQModel's overrides: the first matching rule wins, a "-:" rule never changes a module that is quantized."""
    four, eight = (next(c for c in CASES if c.id == id) for id in ("gptq4", "gptq8"))
    a = random_matrix(four, 16, 64, 32, "f16", bias=False, seed=5)
    b = random_matrix(eight, 16, 64, 16, "f16", bias=False, seed=6)
    tensors = {f"model.a.{k}": v for k, v in four.encode(a).items()}
    tensors |= {f"model.b.{k}": v for k, v in eight.encode(b).items()}
    tensors["model.c.weight"] = np.ones((2, 2), ml_dtypes.bfloat16)
    rules = {"-:.*c$": {}, r"+:.*\.b$": {"bits": 8, "group_size": 16}, ".*b": {"bits": 4}}
    format = find_format(open_checkpoint(write_checkpoint(tmp_path, tensors, four.config(32) | {"dynamic": rules})))
    same_matrix(format.matrix("model.a"), a)
    same_matrix(format.matrix("model.b"), b)
    assert format.parameters() == ["model.a.weight", "model.b.weight", "model.c.weight"]
    assert not format.is_quantized("model.c")
    np.testing.assert_array_equal(format.dense("model.c"), np.ones((2, 2), np.float32))


#: of module layers.1.mlp.up and of layers.1.mlp.up_b group sizes, both 32 without them
RULES = {
    "the first from the beginning": ("dynamic", {r"layers\.1.*up$": 16, ".*up": 64}, (16, 64)),
    "marked patterns": ("dynamic", {r"-:.*\.3\.": 16, r"+:.*up$": 64, "+:mlp": 16}, (64, 32)),
    "an own name before patterns": ("extra_config", {".*up": 64, "layers.1.mlp.up": 16}, (16, 64)),
    "the first that is found anywhere": ("extra_config", {"mlp.up$": 16, "up_b": 64, "layers.1": 128}, (16, 64)),
    "a module's name is no pattern": ("extra_config", {"layers.1.mlp.up": 16}, (16, 32)),
    "a text that is no pattern": ("extra_config", {"*up": 64, r".*up$": 16}, (16, 32)),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("id", ["awq", "gptq4"])
def test_overrides_of_modules(id: str, name: str, tmp_path: Path) -> None:
    """As GPTQModel's dynamic_get and AutoRound's get_layer_config match; a wrong group size does not fit scales."""
    field, rules, sizes = RULES[name]
    case = next(c for c in CASES if c.id == id)
    tensors, modules = {}, {}
    for seed, (module, size) in enumerate(zip(("layers.1.mlp.up", "layers.1.mlp.up_b"), sizes, strict=True)):
        modules[module] = random_matrix(case, 16, 128, size, "f16", bias=False, seed=seed)
        tensors |= {f"{module}.{key}": array for key, array in case.encode(modules[module]).items()}
    config = case.config(32) | {field: {key: {"group_size": size, "bits": 4} for key, size in rules.items()}}
    if field == "extra_config":
        packing = "auto_round:auto_awq" if id == "awq" else "auto_round:auto_gptq"
        config = {k: v for k, v in config.items() if k != "checkpoint_format"}
        config |= {"quant_method": "auto-round", "packing_format": packing}
    format = find_format(open_checkpoint(write_checkpoint(tmp_path, tensors, config)))
    for module, want in modules.items():
        same_matrix(format.matrix(module), want)
        assert f"group {want.group_size}" in format.scheme(module).text


@pytest.mark.parametrize(
    ("id", "rules", "text"),
    [
        ("awq", {"dynamic": {"+:m": {"bits": 8}}}, r"m: AWQ bits=8 \(dynamic '\+:m'\); supported: 4 bits"),
        ("gptq4", {"dynamic": {"m": {"bits": 5}}}, r"m: unsupported GPTQ bits=5, sym=True \(dynamic 'm'\); supported"),
        ("awq", {"dynamic": {"m": {"group_size": 0}}}, "the quantization configuration .* group size 0"),
        ("awq", {"dynamic": {"m": 4}}, "dynamic: 'm' is 4, expected an object"),
    ],
)
def test_overrides_that_are_not_carried_are_named(id: str, rules: dict, text: str, tmp_path: Path) -> None:
    case = next(c for c in CASES if c.id == id)
    folder = write(tmp_path, case, random_matrix(case, 16, 128, 32, "f16", bias=False, seed=0))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] |= rules
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=text):
        find_format(open_checkpoint(folder)).scheme("m")


@pytest.mark.parametrize(
    ("said", "v2"),
    [
        ({"packing_format": "auto_round"}, True),
        ({"packing_format": "auto_round:gptqmodel", "backend": "auto"}, True),
        ({"packing_format": "auto_round:auto_gptq"}, False),
        ({"backend": "autoround:exllamav2"}, True),  # releases before 0.5
        ({"backend": "auto_round:gptq:exllamav2"}, False),
        ({"backend": "gptq:exllamav2"}, False),
    ],
)
@pytest.mark.parametrize("id", ["gptq4-asym", "gptq8-desc_act-asym-v2", "gptq4"])
def test_autoround_zero_points(id: str, said: dict[str, str], v2: bool, tmp_path: Path) -> None:
    case = next(c for c in CASES if c.id == id)
    want = random_matrix(case, 16, 128, 32, "f16", bias=False, seed=7)
    config = {"bits": int(case.kind[3:]), "group_size": 32, "sym": not case.zero_points, "quant_method": "auto-round"}
    tensors = {f"m.{k}": v for k, v in gptq(want, v2).items()}
    same_matrix(find_format(open_checkpoint(write_checkpoint(tmp_path, tensors, config | said))).matrix("m"), want)


@pytest.mark.parametrize("said", [{}, {"backend": "auto"}])
@pytest.mark.parametrize("kind", ["gptq4", "gptq8"])
def test_autoround_packing_unsaid(kind: str, said: dict[str, str], tmp_path: Path) -> None:
    """The zero points of symmetric weights tell; where they cannot, the module and what is missing are named."""
    case = next(c for c in CASES if c.id == kind)
    want = random_matrix(case, 16, 64, 32, "f16", bias=False, seed=8)
    config = {"bits": int(case.kind[3:]), "group_size": 32, "sym": True, "quant_method": "auto-round"} | said
    for v2 in (False, True):
        tensors = {f"m.{k}": v for k, v in gptq(want, v2).items()}
        folder = write_checkpoint(tmp_path / str(v2), tensors, config)
        same_matrix(find_format(open_checkpoint(folder)).matrix("m"), want)
        with pytest.raises(CheckpointError, match=r"m: asymmetric.* expected a packing_format"):
            find_format(open_checkpoint(write_checkpoint(folder, tensors, config | {"sym": False}))).scheme("m")
    tensors["m.qzeros"] = tensors["m.qzeros"] ^ np.int32(1)
    folder = write_checkpoint(tmp_path / "odd", tensors, config)
    with pytest.raises(CheckpointError, match=r"m\.qzeros is neither (8 nor 7|128 nor 127) .* a packing_format"):
        find_format(open_checkpoint(folder)).matrix("m")


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        ({"quant_method": "eetq"}, "quantization method 'eetq'; supported formats: compressed-tensors"),
        ({"quant_method": "exl3"}, "method 'exl3', which is not read: its weights are paths through a trellis"),
        ({"quant_method": "aqlm"}, "method 'aqlm', which is not read: its weights are sums of vectors"),
        ({"quant_method": "vptq"}, "method 'vptq', which is not read: its weights are vectors from learned codebooks"),
        ({"quant_method": ["exl3"]}, "quantization method ['exl3']; supported formats: compressed-tensors"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "'marlin'; supported: gptq, gptq_v2"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
            "'auto_round:llm_compressor'; s",
        ),
        ({"quant_method": "auto-round", "packing_format": "auto_round", "act_bits": 8}, "act_bits 8; supported: 16"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round", "rotation_config": {"a": 1}},
            "rotation_config",
        ),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round", "data_type": "mx_int", "bits": 4},
            "AutoRound data_type 'mx_int', bits 4, packing_format 'auto_round'; supported: mx_fp 4, mx_fp 8",
        ),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "data_type": "nvfp4_v2"},
            "AutoRound data_type 'nvfp4_v2'",
        ),
        (
            {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 4, "rotation_config": {"a": 1}},
            "rotation_config",
        ),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "rotation_config": {"a": 1}},
            "rotation_config",
        ),
        (
            {"quant_method": "auto-round", "data_type": "fp", "bits": 8, "act_bits": 8, "act_dynamic": True},
            "act_group_size) (8, True, None); supported: bits 8, (8, False, 0) or (8, True, -1)",
        ),
        (
            {"quant_method": "auto-round", "data_type": "fp", "bits": 8, "extra_config": {"m": {"group_size": 64}}},
            "extra_config 'm' has group_size of its own; expected bits 16",
        ),
        (
            {"quant_method": "compressed-tensors", "moe_sparsity_config": {"method": "prune", "num_experts": [1]}},
            "moe_sparsity_config {'method': 'prune', 'num_experts': [1]}: layers differ in their number of experts",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "packing 'gemv'; supported: 4 bits, gemm"),
        ({"quant_method": "awq", "bits": 8}, "AWQ bits=8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "supported: e4m3"),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"a": 1}},
            "transform_config has a, expected config",
        ),
        ({"quant_method": "fp_quant"}, "which is not read: its linears rotate and round inputs by rules of their own"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        ({}, "no quantization configuration; supported formats"),
        ({}, "in floating point is quantized with --quantize int4 or another format, or left as it is with none"),
    ],
)
def test_unsupported_is_named(quantization: dict, text: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {"m.experts.0.up_proj.weight": np.zeros(1, np.float32)}, quantization)
    with pytest.raises(CheckpointError) as error:
        find_format(open_checkpoint(folder))
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("fields", "scale", "text"),
    [
        (
            {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
            "k_scale",
            "is fp8_e4m3 (kv_cache_scheme: float8 per tensor)",
        ),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "k_scale", "is fp8_e4m3 (kv_cache_quant_algo: FP8)"),
        (
            {"quantization": {"kv_cache_quant_algo": "NVFP4"}},
            "k_scale",
            "stays float: NVFP4 is none of FP8, INT8; --cache fp8 and --cache int8",
        ),
        (
            {},
            "v_scale",
            "stays float: nothing says of which codes the scales are; the checkpoint wants it quantized "
            "(it has scales; not used: model.layers.0.attn.v_scale and 1 more)",
        ),
        ({}, "q_scale", None),
    ],
)
def test_what_is_said_of_the_kv_cache(fields: dict, scale: str, text: str | None, tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.attn.{scale}": np.zeros((), np.float32) for i in range(2)}
    format = find_format(open_checkpoint(write_checkpoint(tmp_path, tensors, {"quant_method": "modelopt"} | fields)))
    assert format.kv_cache().startswith(f"the KV cache {text}") if text else format.kv_cache() == ""


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        (
            {
                "quant_method": "quark",
                "global_quant_config": {
                    "weight": {"dtype": "int8", "qscheme": "per_channel"},
                    "output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
                },
            },
            "m: Quark output_tensors fp8_e4m3 per_tensor; supported: none, but of the KV cache",
        ),
        ({"quant_method": "gptq", "bits": 5, "sym": True}, "bits=5, sym=True; supported: 2, 3, 4 and 8 bits"),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {
                    "weight": [
                        {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
                        {"dtype": "int4", "qscheme": "per_channel"},
                    ]
                },
            },
            "m: Quark weights quantized in stages, fp8_e4m3 per_tensor then int4 per_channel; supported: one stage",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo W4A8_AWQ; supported: NVFP4, NVFP4_AWQ"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 1, "group_size": 128}}},
            },
            "pack-quantized int1 A16 group 128; supported: pack-quantized int2",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {
                    "g": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                        "input_activations": {"num_bits": 4, "type": "int", "strategy": "token", "dynamic": True},
                    }
                },
            },
            "int4 per token, dynamic, with weights per channel are not supported; supported: int8_token",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {
                    "g": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 4, "group_size": 128},
                        "output_activations": {"num_bits": 8, "type": "float"},
                    }
                },
            },
            "m: output_activations float8 per tensor are not supported; expected none",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128}}},
                "ignore": ["lm_head", "re:m"],
            },
            "m has quantized tensors, but the configuration's ignore says that it is not quantized",
        ),
    ],
)
def test_unsupported_scheme_is_named(quantization: dict, text: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {"m.weight_scale": np.zeros(1, np.float32)}, quantization)
    with pytest.raises(CheckpointError, match="m") as error:
        find_format(open_checkpoint(folder)).scheme("m")
    assert text in str(error.value)


@pytest.mark.parametrize("quantize", [None, "int4", "none"])
@pytest.mark.parametrize(
    "quantization",
    [{}, {"quant_method": "gptq", "bits": 4}, {"quant_method": "compressed-tensors"}, {"quant_method": "bitsandbytes"}],
)
@pytest.mark.parametrize("other", ["model.layers.0.conv.conv.weight", "model.visual.patch_embed.weight", "x"])
def test_dense_models_are_named_at_once(other: str, quantization: dict, quantize: str | None, tmp_path: Path) -> None:
    """Before any other advice: a tensor of three dimensions is a convolution's, too."""
    tensors = {
        "model.layers.0.mlp.up_proj.weight": np.zeros((8, 8), np.float32),
        other: np.zeros((4, 1, 3), np.float32),
    }
    folder = write_checkpoint(tmp_path, tensors, quantization, model_type="qwen3", num_experts=None)
    with pytest.raises(CheckpointError, match=r": a dense model \(qwen3\): no experts; expected a mixture of experts"):
        moe_layers(open_format(folder, quantize, None))
    assert all("a dense model (qwen3): no experts" in text for text in survey(folder)["refused"].values())
