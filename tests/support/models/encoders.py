"""Slow, obvious encoders of a canonical matrix into each format's tensors: the inverse of exporter/formats.

Written from the formats' descriptions, not from the decoders: bits are laid out one by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.schemes import SCHEMES

Tensors = dict[str, np.ndarray]


def bit_stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """[R, C] codes -> I32 [R, ceil(C bits / 32)], least significant bit first, zero-padded."""
    stream = ((codes[..., None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(stream, axis=1, bitorder="little").view("<i4")


def nibbles(codes: np.ndarray) -> np.ndarray:
    """[.., C] -> U8 [.., C / 2], low nibble first."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def by_feature(matrix: QuantizedMatrix) -> np.ndarray:
    """Codes with columns in input-feature order."""
    if matrix.perm is None:
        return matrix.codes
    codes = np.empty_like(matrix.codes)
    codes[:, matrix.perm] = matrix.codes
    return codes


def g_idx(matrix: QuantizedMatrix) -> np.ndarray:
    k = matrix.shape[1]
    groups = (np.arange(k) // (matrix.group_size if matrix.group_size > 0 else k)).astype(np.int32)
    if matrix.perm is None:
        return groups
    found = np.empty_like(groups)
    found[matrix.perm] = groups
    return found


def with_bias(tensors: Tensors, matrix: QuantizedMatrix) -> Tensors:
    return tensors if matrix.bias is None else tensors | {"bias": matrix.bias}


def gptq(matrix: QuantizedMatrix, v2: bool = False, bits: int = 0) -> Tensors:
    """``bits``: of codes that are carried as int4's; 0: the matrix' own."""
    bits = bits or int(matrix.kind[3:])
    zeros = np.full(matrix.scales.shape, 1 << (bits - 1)) if matrix.zero_points is None else matrix.zero_points
    if not v2 and bits == 3:  # which lie across words: GPTQModel subtracts one from each
        zeros = (zeros.astype(np.int64) - 1) & 7
    stored = np.ascontiguousarray(bit_stream(zeros.T, bits))
    if not v2 and bits != 3:  # and here from every code of a word at once
        ones = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[bits]
        stored = (stored.view(np.uint32) - np.uint32(ones)).view(np.int32)
    tensors = {
        "qweight": np.ascontiguousarray(bit_stream(by_feature(matrix), bits).T),
        "qzeros": stored,
        "scales": np.ascontiguousarray(matrix.scales.T),
        "g_idx": g_idx(matrix),
    }
    return with_bias(tensors, matrix)


def awq(matrix: QuantizedMatrix) -> Tensors:
    def pack(codes: np.ndarray) -> np.ndarray:  # [R, N]
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word holds logical column order[i]
        return bit_stream(codes.reshape(len(codes), -1, 8)[..., order].reshape(len(codes), -1), 4)

    zeros = np.full(matrix.scales.shape, 8, np.uint8) if matrix.zero_points is None else matrix.zero_points
    tensors = {
        "qweight": pack(matrix.codes.T),
        "qzeros": pack(zeros.T),
        "scales": np.ascontiguousarray(matrix.scales.T),
    }
    return with_bias(tensors, matrix)


def ct_pack(matrix: QuantizedMatrix) -> Tensors:
    bits = int(matrix.kind[3:])
    tensors = {
        "weight_packed": bit_stream(by_feature(matrix), bits),
        "weight_scale": matrix.scales,
        "weight_shape": np.array(matrix.shape, np.int64),
    }
    if matrix.zero_points is not None:
        tensors["weight_zero_point"] = np.ascontiguousarray(bit_stream(matrix.zero_points.T, bits).T)
    if matrix.perm is not None:
        tensors["weight_g_idx"] = g_idx(matrix)
    return with_bias(tensors, matrix)


def ct_int(matrix: QuantizedMatrix) -> Tensors:
    middle = 1 << (int(matrix.kind[3:]) - 1)
    tensors = {
        "weight": (matrix.codes.astype(np.int16) - middle).astype(np.int8),
        "weight_scale": matrix.scales,
    }
    if matrix.zero_points is not None:
        tensors["weight_zero_point"] = (matrix.zero_points.astype(np.int16) - middle).astype(np.int8)
    return with_bias(tensors, matrix)


def fp8_blocks(matrix: QuantizedMatrix) -> Tensors:
    import ml_dtypes

    codes = matrix.codes.view(ml_dtypes.float8_e4m3fn)
    return with_bias({"weight": codes, "weight_scale_inv": matrix.scales}, matrix)


def fbgemm(matrix: QuantizedMatrix) -> Tensors:
    import ml_dtypes

    codes = matrix.codes.view(ml_dtypes.float8_e4m3fn)
    return with_bias({"weight": codes, "weight_scale": matrix.scales}, matrix)


def modelopt_nvfp4(matrix: QuantizedMatrix) -> Tensors:
    tensors = {
        "weight": nibbles(matrix.codes),
        "weight_scale": matrix.scales,
        "weight_scale_2": np.array(matrix.global_scale, np.float32),
        "input_scale": np.array(matrix.input_scale, np.float32),
    }
    if matrix.pre_scale is not None:
        tensors["pre_quant_scale"] = matrix.pre_scale
    return with_bias(tensors, matrix)


def modelopt_awq(matrix: QuantizedMatrix) -> Tensors:
    signed = (matrix.codes.astype(np.int8) - 8) & 15
    tensors = {
        "weight": (signed[0::2] | signed[1::2] << 4).astype(np.uint8),
        "weight_scale": matrix.scales,
        "pre_quant_scale": matrix.pre_scale,
    }
    return with_bias(tensors, matrix)


def quark_int4(matrix: QuantizedMatrix) -> Tensors:
    stored = awq(replace(matrix, codes=matrix.codes ^ 8, zero_points=np.zeros(matrix.scales.shape, np.uint8)))
    names = {"qweight": "weight", "qzeros": "weight_zero_point", "scales": "weight_scale", "bias": "bias"}
    return {names[key]: array for key, array in stored.items()}


def quark_int4_rows(matrix: QuantizedMatrix) -> Tensors:
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # as awq's, along K
    codes = matrix.codes.reshape(len(matrix.codes), -1, 8)[..., order].reshape(matrix.shape)
    tensors = {"weight": bit_stream(codes, 4), "weight_scale": matrix.scales[:, 0]}
    zeros = np.pad(matrix.zero_points[:, 0], (0, -len(codes) % 8)).reshape(-1, 8)[:, order].reshape(1, -1)
    return with_bias(tensors | {"weight_zero_point": bit_stream(zeros, 4)[0]}, matrix)


def mxfp4(matrix: QuantizedMatrix) -> Tensors:
    return with_bias({"weight": nibbles(matrix.codes), "weight_scale": matrix.scales.view(np.uint8)}, matrix)


def bitsandbytes(matrix: QuantizedMatrix, block: int = 0, nested: bool = False) -> Tensors:
    """``block``: weights of a block, which the matrix' groups are parts of. ``nested``: scales are 1/2, 1, 3/2 .."""
    kind, codes = {"nf4": "nf4", "bnb_fp4": "fp4"}[matrix.kind], matrix.codes.reshape(-1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block or matrix.group_size, "dtype": "bfloat16"}
    tensors = {
        "weight": (codes[0::2] << 4 | codes[1::2])[:, None],
        "weight.absmax": matrix.scales.reshape(-1)[:: state["blocksize"] // matrix.group_size],
        "weight.quant_map": SCHEMES[matrix.kind].table.astype(np.float32),
    }
    if nested:
        blocks = len(tensors["weight.absmax"])
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
        tensors["weight.nested_absmax"] = np.full(-(-blocks // 256), 0.5, np.float32)
        tensors["weight.nested_quant_map"] = np.arange(256, dtype=np.float32)
        tensors["weight.absmax"] = (tensors["weight.absmax"] * 2 - 1).astype(np.uint8)
    text = json.dumps(state | {"shape": list(matrix.shape)}).encode()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(text, np.uint8)
    return with_bias(tensors, matrix)


def hqq(matrix: QuantizedMatrix, bits: int = 4, axis: int = 1) -> Tensors:
    groups = matrix.codes.reshape(-1, matrix.group_size)
    count, dtype = {1: (8, np.uint8), 2: (4, np.uint8), 3: (10, np.int32), 4: (2, np.uint8)}.get(bits, (1, np.uint8))
    padded = np.pad(groups, ((0, -len(groups) % count), (0, 0))).astype(dtype)
    packed = np.zeros((len(padded) // count, matrix.group_size), dtype)
    for part in np.split(padded, count):
        packed = packed << (bits if count > 1 else 0) | part
    scales = matrix.scales["d"].reshape(-1, 1)
    name = f"{bits if count > 1 else 8}bit_{'32' if bits == 3 else 'u8'}"
    tensors = {
        "W_q": packed,
        "scale": scales,
        "zero": (matrix.scales["d_min"].reshape(-1, 1).astype(np.float64) / scales).astype(np.float32),
        "packing": np.frombuffer(name.encode(), np.uint8),
        "shape": np.array(matrix.shape, np.int32),
    }
    numbers = {"nbits": bits, "axis": axis, "group_size": matrix.group_size}
    return with_bias(tensors | {key: np.array(value, np.int32) for key, value in numbers.items()}, matrix)


@dataclass(frozen=True)
class Case:
    """One row of the table: what a tool's checkpoint can hold, and how it is written.

    ``n_step`` and ``k_step`` are the multiples of N and K that the format can store.
    """

    id: str
    encode: Callable[[QuantizedMatrix], Tensors]
    quantization: dict[str, Any]
    kind: str
    group_sizes: tuple[int, ...] = (-1, 16, 32, 64, 128)
    scales: tuple[str, ...] = ("bf16", "f16", "f32")
    zero_points: bool = False
    perm: bool = False
    block_n: int = 1
    global_scale: bool = False
    pre_scale: bool = False
    n_step: int = 1
    k_step: int = 1
    optional: frozenset[str] = field(default_factory=lambda: frozenset({"bias"}))

    def config(self, group_size: int) -> dict[str, Any]:
        """The quantizer's configuration, with the group size where the tool puts it."""
        return _fill(self.quantization, group_size)


def _fill(raw: Any, group_size: int) -> Any:
    if isinstance(raw, dict):
        return {key: _fill(value, group_size) for key, value in raw.items()}
    if isinstance(raw, str) and raw == "<g>":
        return group_size
    if isinstance(raw, str) and raw == "<strategy>":
        return "channel" if group_size == -1 else "group"
    return raw


def _ct(format: str, bits: int, symmetric: bool = True, inputs: dict[str, Any] | None = None, **weights: Any) -> dict:
    args = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "<strategy>",
        "group_size": "<g>",
        **weights,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


def _gptq(bits: int, sym: bool = True, desc_act: bool = False, v2: bool = False) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": "<g>",
        "sym": sym,
        "desc_act": desc_act,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }


def gptq_v2(matrix: QuantizedMatrix) -> Tensors:
    return gptq(matrix, v2=True)


_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_OPTIONAL_ORDER = frozenset({"bias", "g_idx", "weight_g_idx"})
CASES = [
    Case("ct-w4a16", ct_pack, _ct("pack-quantized", 4), "int4"),
    Case("ct-w8a16", ct_pack, _ct("pack-quantized", 8), "int8"),
    Case("ct-w4a16-asym", ct_pack, _ct("pack-quantized", 4, symmetric=False), "int4", zero_points=True),
    Case("ct-w8a16-asym", ct_pack, _ct("pack-quantized", 8, symmetric=False), "int8", zero_points=True),
    Case(
        "ct-w4a16-g_idx",
        ct_pack,
        _ct("pack-quantized", 4, actorder="group"),
        "int4",
        (16, 32, 128),
        perm=True,
        optional=_OPTIONAL_ORDER,
    ),
    Case("ct-w8a8", ct_int, _ct("int-quantized", 8, inputs=_TOKEN), "int8"),
    Case("ct-w8a8-asym", ct_int, _ct("int-quantized", 8, False, inputs=_TOKEN), "int8", (-1,), zero_points=True),
    Case("ct-w4a8", ct_int, _ct("int-quantized", 4, inputs=_TOKEN), "int4"),
    Case("gptq4", gptq, _gptq(4), "int4", k_step=8, n_step=8, optional=_OPTIONAL_ORDER),
    Case("gptq8", gptq, _gptq(8), "int8", k_step=4, n_step=4, optional=_OPTIONAL_ORDER),
    Case("gptq4-v2", gptq_v2, _gptq(4, v2=True), "int4", k_step=8, n_step=8, optional=_OPTIONAL_ORDER),
    Case(
        "gptq4-desc_act",
        gptq,
        _gptq(4, desc_act=True),
        "int4",
        (16, 32, 128),
        perm=True,
        k_step=8,
        n_step=8,
        optional=_OPTIONAL_ORDER,
    ),
    Case(
        "gptq8-desc_act-asym-v2",
        gptq_v2,
        _gptq(8, sym=False, desc_act=True, v2=True),
        "int8",
        (16, 32, 128),
        zero_points=True,
        perm=True,
        k_step=4,
        n_step=4,
        optional=_OPTIONAL_ORDER,
    ),
    Case(
        "gptq4-asym",
        gptq,
        _gptq(4, sym=False),
        "int4",
        zero_points=True,
        k_step=8,
        n_step=8,
        optional=_OPTIONAL_ORDER,
    ),
    Case(
        "awq",
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": "<g>", "zero_point": True, "version": "gemm"},
        "int4",
        zero_points=True,
        n_step=8,
    ),
    Case(
        "fp8-128x128",
        fp8_blocks,
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        "fp8_e4m3",
        (128,),
        scales=("f32", "bf16"),
        block_n=128,
    ),
    Case(
        "fbgemm-fp8",
        fbgemm,
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        "fp8_e4m3",
        (-1,),
        scales=("f32", "bf16"),
    ),
    Case(
        "bitsandbytes-nf4",
        bitsandbytes,
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "nf4",
        (32,),
        scales=("f32",),
        k_step=32,
    ),
    Case(
        "hqq",
        hqq,
        {"quant_method": "hqq", "skip_modules": ["lm_head"]},
        "q4_1",
        (32,),
        scales=("f32_minima",),
        n_step=2,
        k_step=32,
        optional=frozenset({"bias", "group_size"}),
    ),
    Case(
        "modelopt-nvfp4",
        modelopt_nvfp4,
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "nvfp4",
        (16,),
        scales=("e4m3",),
        global_scale=True,
        k_step=2,
    ),
    Case(
        "modelopt-nvfp4-awq",
        modelopt_nvfp4,
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
        "nvfp4",
        (16,),
        scales=("e4m3",),
        global_scale=True,
        pre_scale=True,
        k_step=2,
        optional=frozenset({"bias", "pre_quant_scale"}),
    ),
    Case(
        "modelopt-w4a16-awq",
        modelopt_awq,
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": "<g>"},
        "int4",
        (64, 128),
        pre_scale=True,
        n_step=2,
        optional=frozenset({"bias", "pre_quant_scale"}),
    ),
    Case(
        "quark-int4",
        quark_int4,
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_group", "group_size": "<g>"}},
        },
        "int4",
        (32, 64, 128),
        n_step=8,
        optional=frozenset({"bias", "weight_zero_point"}),
    ),
    Case(
        "quark-uint4-rows",
        quark_int4_rows,
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "uint4", "qscheme": "per_channel"}}},
        "int4",
        (-1,),
        zero_points=True,
        n_step=8,
        k_step=8,
    ),
    Case(
        "quark-mxfp4",
        mxfp4,
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}},
        },
        "mxfp4",
        (32,),
        scales=("e8m0",),
        k_step=2,
    ),
]


def random_matrix(case: Case, n: int, k: int, group_size: int, scale: str, bias: bool, seed: int) -> QuantizedMatrix:
    rng = np.random.default_rng(seed)
    groups = 1 if group_size == -1 else -(-k // group_size)
    shape = (-(-n // case.block_n), groups)
    top = 1 << SCHEMES[case.kind].bits
    codes = rng.integers(0, top, (n, k), np.uint8) if top == 16 else rng.integers(0, 256, (n, k)).astype(np.uint8)
    zero_points = None
    if case.zero_points:
        zero_points = rng.integers(0, top, shape).astype(np.uint8)
        zero_points.flat[0] = 0  # never all at the midpoint; zero is v1 GPTQ's borrow
    perm = rng.permutation(k).astype(np.int32) if case.perm else None
    if perm is not None and group_size < k:
        # within a group, decoders keep the input features' order (a stable sort)
        perm = np.concatenate([np.sort(perm[i : i + group_size]) for i in range(0, k, group_size)])
    if perm is not None and np.array_equal(perm // group_size, np.arange(k) // group_size):
        perm = None
    scales = rng.uniform(0.01, 2, shape).astype(SCALE_DTYPES["bf16" if scale == "f32_minima" else scale])
    if scale == "f32_minima":  # of zero points that have few bits
        levels = np.empty(shape, SCALE_DTYPES[scale])
        levels["d"] = scales
        levels["d_min"] = levels["d"] * rng.uniform(-20, 20, shape).astype(SCALE_DTYPES["bf16"]).astype(np.float32)
        scales = levels
    return QuantizedMatrix(
        kind=case.kind,
        codes=codes,
        scales=scales,
        group_size=group_size,
        block_n=case.block_n,
        zero_points=zero_points,
        global_scale=float(np.float32(rng.uniform(0.1, 1))) if case.global_scale else None,
        input_scale=float(np.float32(rng.uniform(0.1, 1))) if case.global_scale else None,
        pre_scale=rng.uniform(0.5, 2, k).astype(np.float32) if case.pre_scale else None,
        bias=rng.normal(size=n).astype(np.float32) if bias else None,
        perm=perm,
    )
