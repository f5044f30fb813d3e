"""ggml's blocks of quantized weights, as GGUF files hold them: block_q4_0 and so on of ggml-common.h.

A block is a scale, or two levels of scales, and its weights' codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.exporter.reading.gguf import codebooks


def _halves(octets: np.ndarray) -> np.ndarray:
    """Return the nibbles of blocks [.., B] as [.., 2 B]: the low ones of all bytes, then the high ones."""
    return np.concatenate([octets & 15, octets >> 4], axis=-1)


def _q4_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _halves(blocks[..., 2:]), _f16(blocks[..., :2])


def _q5_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    fifth = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    return (_halves(blocks[..., 6:]) | fifth << 4) + 112, _f16(blocks[..., :2])  # 16 is their zero, 128 int8's


def _q4_1(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _halves(blocks[..., 4:]), _less_minima(blocks)


def _q5_1(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    fifth = np.unpackbits(blocks[..., 4:8], axis=-1, bitorder="little")
    return _halves(blocks[..., 8:]) | fifth << 4, _less_minima(blocks)


def _less_minima(blocks: np.ndarray) -> np.ndarray:
    """Return f16_minima scales. ggml adds what they subtract."""
    levels = np.empty((*blocks.shape[:-1], 1), SCALE_DTYPES["f16_minima"])
    levels["d"], levels["d_min"] = _f16(blocks[..., :2]), -_f16(blocks[..., 2:4])
    return levels


def _q8_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return blocks[..., 2:] ^ 128, _f16(blocks[..., :2])


def _mxfp4(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _halves(blocks[..., 1:]), np.ascontiguousarray(blocks[..., :1]).view(SCALE_DTYPES["e8m0"])


def _nvfp4(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decode four scales e4m3, then four runs of 8 bytes with the nibbles of 16 weights. Scale 127 is 0 in ggml."""
    runs = _halves(blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8))
    scales = np.where(blocks[..., :4] == 127, 0, blocks[..., :4]).astype(np.uint8)
    return runs.reshape(*blocks.shape[:-1], 64), scales.view(SCALE_DTYPES["e4m3"])


def _q2_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decode 16 bytes with a scale and a minimum of 4 bits, 64 bytes of pairs of bits, and two f16."""
    pairs = blocks[..., 16:80].reshape(*blocks.shape[:-1], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    levels = np.empty((*blocks.shape[:-1], 1), SCALE_DTYPES["k16_minima"])
    levels["d"], levels["d_min"] = _f16(blocks[..., 80:82]), _f16(blocks[..., 82:])
    levels["levels"][..., 0, :] = blocks[..., :16]
    return pairs.reshape(*blocks.shape[:-1], 256), levels


def _q3_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """32 bytes of third bits, 64 of pairs of bits, 12 of 16 scales of 6 bits, and their scale."""
    high = (blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # of weight 32 i + j bit i of byte j
    low = blocks[..., 32:96].reshape(*blocks.shape[:-1], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    codes = low.reshape(high.shape) | high << 2
    packed = blocks[..., 96:108]
    four = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    two = (packed[..., None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]).reshape(four.shape) & 3
    scales = (four | two << 4).astype(np.int8) - np.int8(32)
    return codes.reshape(*blocks.shape[:-1], 256) + 4, scales * _f16(blocks[..., 108:]).astype(np.float32)


def _levels32(blocks: np.ndarray) -> np.ndarray:
    """k32 scales: two f16, then 8 scales and 8 minima of 6 bits in 12 bytes.

    The first four scales, and the first four minima, are the low 6 bits of a byte. The last four are a nibble of the
    last four bytes, and the 2 high bits of the first bytes.
    """
    levels = np.empty((*blocks.shape[:-1], 1), SCALE_DTYPES["k32"])
    levels["d"], levels["d_min"] = _f16(blocks[..., :2]), _f16(blocks[..., 2:4])
    packed = blocks[..., 4:16]
    for name, at, nibbles in (("scales", 0, packed[..., 8:] & 15), ("minima", 4, packed[..., 8:] >> 4)):
        first = packed[..., at : at + 4]
        levels[name][..., 0, :] = np.concatenate([first & 63, nibbles | first >> 6 << 4], axis=-1)
    return levels


def _q4_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    nibbles = _halves(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32))
    return nibbles.reshape(*blocks.shape[:-1], 256), _levels32(blocks)


def _q5_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decode _q4_k's blocks with 32 bytes of fifth bits before the nibbles. Weight 32 i + j has bit i of byte j."""
    nibbles = _halves(blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32)).reshape(*blocks.shape[:-1], 8, 32)
    fifth = (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return (nibbles | fifth << 4).reshape(*blocks.shape[:-1], 256), _levels32(blocks)


def _q6_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """128 bytes of low nibbles, 64 of pairs of high bits, 16 scales int8, and their scale; in halves of 128 weights."""
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64)
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    codes = _halves(low) | (high & 3).reshape(*blocks.shape[:-1], 2, 128) << 4
    levels = np.empty((*blocks.shape[:-1], 1), SCALE_DTYPES["k16"])
    levels["d"], levels["scales"][..., 0, :] = _f16(blocks[..., 208:]), blocks[..., 192:208].view(np.int8)
    return codes.reshape(*blocks.shape[:-1], 256), levels


def _f16(octets: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(octets).view("<f2")


class Block(NamedTuple):
    """A type's carrier.

    Attributes:
        decode: blocks uint8 [.., bytes] -> codes uint8 [.., weights], scales [.., groups].
        cuda: whether CUDA kernels take it: yes, no, or "yes *" with ``--scales bf16``.
        own: an integer of fewer bits, where a target has kernels for it.
    """

    kind: str
    group_size: int
    scales: str
    decode: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    cuda: str = "yes"
    own: str = ""


#: ggml type -> how it is carried
CARRIED = {
    "Q4_0": Block("int4", 32, "f16", _q4_0),
    "Q4_1": Block("q4_1", 32, "f16_minima", _q4_1, "no"),
    "Q5_0": Block("int8", 32, "f16", _q5_0, own="int5"),
    "Q5_1": Block("q5_1", 32, "f16_minima", _q5_1, "no"),
    "Q8_0": Block("int8", 32, "f16", _q8_0),
    "MXFP4": Block("mxfp4", 32, "e8m0", _mxfp4),
    "NVFP4": Block("nvfp4", 16, "e4m3", _nvfp4),
    "Q2_K": Block("q2_k", 256, "k16_minima", _q2_k, "no"),
    "Q3_K": Block("int4", 16, "f32", _q3_k, "no"),
    "Q4_K": Block("q4_k", 256, "k32", _q4_k),
    "Q5_K": Block("q5_k", 256, "k32", _q5_k),
    "Q6_K": Block("q6_k", 256, "k16", _q6_k),
    "IQ4_NL": Block("int8", 32, "f16", codebooks.iq4_nl),
    "IQ4_XS": Block("int8", 32, "f32", codebooks.iq4_xs, "yes *"),
    "IQ3_S": Block("int8", 32, "f32", codebooks.iq3_s, "yes *"),
    "IQ3_XXS": Block("int8", 32, "f32", codebooks.iq3_xxs, "yes *"),
    "IQ2_S": Block("int8", 16, "f32", codebooks.iq2_s, "no"),
    "IQ2_XS": Block("int8", 16, "f32", codebooks.iq2_xs, "no"),
    "IQ2_XXS": Block("int8", 32, "f32", codebooks.iq2_xxs, "yes *"),
    "IQ1_S": Block("int8", 32, "f32", codebooks.iq1_s, "yes *"),
    "IQ1_M": Block("int8", 16, "f32", codebooks.iq1_m, "no"),
    "TQ1_0": Block("int4", 256, "f16", codebooks.tq1_0, own="int2"),
    "TQ2_0": Block("int4", 256, "f16", codebooks.tq2_0, own="int2"),
    "Q1_0": Block("int4", 128, "f16", codebooks.q1_0, own="int2"),
}


def dequantized(kind: str, blocks: np.ndarray) -> np.ndarray:
    """Return the weights f32 [N, K] of rows of blocks.

    Args:
        kind: a ggml type of :data:`CARRIED`.
        blocks: uint8 [N, blocks in a row, bytes].
    """
    block = CARRIED[kind]
    codes, scales = (part.reshape(len(blocks), -1) for part in block.decode(blocks))
    return QuantizedMatrix(kind=block.kind, codes=codes, scales=scales, group_size=block.group_size).dequantize(
        np.float32
    )
