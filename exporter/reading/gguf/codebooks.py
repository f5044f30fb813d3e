"""ggml's types whose codes are places in a table of groups of weights (IQ), or one of two or three values.

They are carried in wider codes, exactly: a weight is a group's scale times an integer below 128. The tables come from
gguf-py (ggml-common.h: iq2xxs_grid and so on). Each function takes blocks uint8 [.., bytes], and returns codes uint8
[.., weights] and scales [.., groups].
"""

from __future__ import annotations

from functools import cache

import numpy as np

#: weight of a 4-bit code, IQ4_NL and IQ4_XS (kvalues_iq4nl)
_CURVE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
#: 7 sign bits -> 8: an even number of them is set (ksigns_iq2xs)
_SIGNS = np.array([i | (i.bit_count() & 1) << 7 for i in range(128)], np.uint8)

_Parts = tuple[np.ndarray, np.ndarray]


@cache
def _grid(kind: str) -> np.ndarray:
    """Return a type's table: int8 [entries, 4 or 8]."""
    from gguf import quants

    found = getattr(quants, kind)
    found.init_grid()
    return found.grid[0, 0].astype(np.int8)


def _f16(octets: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(octets).view("<f2").astype(np.float32)


def _words(octets: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(octets).view(dtype)


def _nibbles(octets: np.ndarray) -> np.ndarray:
    """Return [.., B] -> [.., 2 B]: each byte's low nibble, then its high one."""
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1)


def _signed(weights: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Return int8's codes. weights: int8 [.., entries, 4 or 8]; signs: uint8, a byte for 8 weights."""
    minus = np.unpackbits(signs, axis=-1, bitorder="little").reshape(*signs.shape[:-1], -1)
    flat = weights.reshape(*minus.shape)
    return np.where(minus, -flat, flat).view(np.uint8) ^ 128


def iq4_nl(blocks: np.ndarray) -> _Parts:
    codes = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1)
    return _CURVE[codes].view(np.uint8) ^ 128, np.ascontiguousarray(blocks[..., :2]).view("<f2")


def iq4_xs(blocks: np.ndarray) -> _Parts:
    """Decode a scale, 8 pairs of high bits of scales, 8 nibbles of low ones, then nibbles in runs of 32 weights."""
    high = _words(blocks[..., 2:4], "<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (_nibbles(blocks[..., 4:8]) | high << 4).astype(np.int8) - np.int8(32)
    runs = blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16)
    codes = _CURVE[np.concatenate([runs & 15, runs >> 4], axis=-1)].reshape(*blocks.shape[:-1], 256)
    return codes.view(np.uint8) ^ 128, _f16(blocks[..., :2]) * scales


def iq3_s(blocks: np.ndarray) -> _Parts:
    """Decode a scale, 64 low bytes of places, 8 bytes of their ninth bits, 32 of signs, 8 nibbles of scales."""
    ninth = np.unpackbits(blocks[..., 66:74], axis=-1, bitorder="little").astype(np.uint16)
    places = blocks[..., 2:66] | ninth << 8
    scales = _f16(blocks[..., :2]) * (1 + 2 * _nibbles(blocks[..., 106:]).astype(np.float32))
    return _signed(_grid("IQ3_S")[places], blocks[..., 74:106]), scales


def iq3_xxs(blocks: np.ndarray) -> _Parts:
    """Decode a scale, 64 places, and for 32 weights a word of four times 7 sign bits and 4 bits of their scale."""
    signs, scales = _signs_and_scales(_words(blocks[..., 66:], "<u4"))
    return _signed(_grid("IQ3_XXS")[blocks[..., 2:66]], signs), _f16(blocks[..., :2]) * scales * np.float32(0.5)


def iq2_xxs(blocks: np.ndarray) -> _Parts:
    """Decode a scale, and for 32 weights four places and a word of four times 7 sign bits and 4 bits of their scale."""
    runs = blocks[..., 2:].reshape(*blocks.shape[:-1], 8, 8)
    places = runs[..., :4].reshape(*blocks.shape[:-1], 32)
    signs, scales = _signs_and_scales(_words(runs[..., 4:], "<u4")[..., 0])
    return _signed(_grid("IQ2_XXS")[places], signs), _f16(blocks[..., :2]) * scales * np.float32(0.25)


def _signs_and_scales(words: np.ndarray) -> _Parts:
    """Return words [.., 8] -> bytes of signs [.., 32], factors of scales f32 [.., 8]."""
    signs = _SIGNS[words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127]
    return signs.reshape(*words.shape[:-1], -1), np.float32(0.5) + (words >> 28).astype(np.float32)


def iq2_xs(blocks: np.ndarray) -> _Parts:
    """Decode a scale, 32 words of 9 bits of a place and 7 of signs, 16 nibbles of scales."""
    words = _words(blocks[..., 2:66], "<u2")
    scales = np.float32(0.5) + _nibbles(blocks[..., 66:]).astype(np.float32)
    return _signed(_grid("IQ2_XS")[words & 511], _SIGNS[words >> 9]), _f16(blocks[..., :2]) * scales * np.float32(0.25)


def iq2_s(blocks: np.ndarray) -> _Parts:
    """Decode a scale, 32 low bytes of places, 32 of signs, 8 of pairs of high bits of places, 16 nibbles of scales."""
    high = blocks[..., 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    places = blocks[..., 2:34] | high.reshape(*blocks.shape[:-1], 32).astype(np.uint16) << 8
    scales = np.float32(0.5) + _nibbles(blocks[..., 74:]).astype(np.float32)
    return _signed(_grid("IQ2_S")[places], blocks[..., 34:66]), _f16(blocks[..., :2]) * scales * np.float32(0.25)


def iq1_s(blocks: np.ndarray) -> _Parts:
    """Decode a scale, 32 low bytes of places, and 8 words.

    A word has 3 high bits of four places, 3 bits of a scale and a shift's sign.
    """
    words = _words(blocks[..., 34:], "<u2")
    high = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(*blocks.shape[:-1], 32)
    scales = _f16(blocks[..., :2]) * (2 * (words >> 12 & 7) + 1).astype(np.float32)
    return _shifted(blocks[..., 2:34] | high << 8, np.repeat(words >> 15, 4, axis=-1)), scales * np.float32(0.125)


def iq1_m(blocks: np.ndarray) -> _Parts:
    """Decode 32 low bytes of places, 32 nibbles, and 4 words.

    A nibble has 3 high bits of a place and a shift's sign, a word four scales and 4 bits of their f16 factor.
    """
    nibbles, words = _nibbles(blocks[..., 32:48]).astype(np.uint16), _words(blocks[..., 48:], "<u2")
    bits = np.bitwise_or.reduce((words >> 12) << np.arange(0, 16, 4, dtype=np.uint16), axis=-1, keepdims=True)
    factors = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(*blocks.shape[:-1], 16)
    scales = bits.view(np.float16).astype(np.float32) * (2 * factors + 1).astype(np.float32)
    return _shifted(blocks[..., :32] | (nibbles & 7) << 8, nibbles >> 3), scales * np.float32(0.125)


def _shifted(places: np.ndarray, minus: np.ndarray) -> np.ndarray:
    """Return int8's codes of -1, 0 and 1 plus or minus an eighth, in eighths."""
    shift = np.where(minus, np.int8(-1), np.int8(1))[..., None]
    return (_grid("IQ1_S")[places] * np.int8(8) + shift).reshape(*places.shape[:-1], -1).view(np.uint8) ^ 128


def tq1_0(blocks: np.ndarray) -> _Parts:
    """Decode 48 bytes of five digits of base 3, 4 of four, and a scale. Digit i: the highest of byte times 3^i."""
    parts = [
        (blocks[..., None, begin:end] * np.array([[1], [3], [9], [27], [81]], np.uint8)[:digits]).reshape(
            *blocks.shape[:-1], -1
        )
        for begin, end, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    ]
    digits = np.concatenate(parts, axis=-1).astype(np.uint16) * 3 >> 8
    return digits.astype(np.uint8) + 7, np.ascontiguousarray(blocks[..., 52:]).view("<f2")


def tq2_0(blocks: np.ndarray) -> _Parts:
    """Decode 64 bytes of pairs of bits, in halves of 128 weights, and a scale."""
    pairs = blocks[..., :64].reshape(*blocks.shape[:-1], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return pairs.reshape(*blocks.shape[:-1], 256) + 7, np.ascontiguousarray(blocks[..., 64:]).view("<f2")


def q1_0(blocks: np.ndarray) -> _Parts:
    """Decode a scale, and a bit for the sign of each weight: set is plus."""
    plus = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little")
    return plus * 2 + 7, np.ascontiguousarray(blocks[..., :2]).view("<f2")
