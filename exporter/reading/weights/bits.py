"""Unpacking integer codes. All functions take and give NumPy arrays, little-endian, least significant bits first.
Outlines (exporter/reading/checkpoint.py) give outlines."""

from __future__ import annotations

import numpy as np

from quantmoe.custom_ops.matrix import SCALE_DTYPES
from quantmoe.exporter.reading.checkpoint import is_outline, outline


def unpack_words(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return the codes of a dense bit stream along the last axis.

    Args:
        words: 32-bit integers [.., W].
        bits: width of a code, 1 to 8; codes may straddle words.
        count: codes wanted of each row; count * bits <= 32 * W.

    Returns:
        uint8 [.., count], writable only where it had to be computed.
    """
    if is_outline(words):
        return outline((*words.shape[:-1], count), np.uint8)
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets[..., :count]
    if bits == 4:
        return unpack_nibbles(octets)[..., :count]
    # 8 codes lie in `bits` bytes: gather them into one 64-bit word, then cut it
    octaves = -(-count // 8)
    padded = np.zeros((*octets.shape[:-1], octaves * bits), np.uint8)
    width = min(octets.shape[-1], padded.shape[-1])
    padded[..., :width] = octets[..., :width]
    word = np.zeros((*octets.shape[:-1], octaves, 8), np.uint8)
    word[..., :bits] = padded.reshape(*octets.shape[:-1], octaves, bits)
    shifts = np.arange(0, 8 * bits, bits, dtype=np.uint64)
    codes = (word.view("<u8") >> shifts) & np.uint64(2**bits - 1)
    return codes.astype(np.uint8).reshape(*octets.shape[:-1], octaves * 8)[..., :count]


def unpack_planes(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return the codes of bit planes along the last axis: 32 codes are ``bits`` words.

    Args:
        words: 32-bit integers [.., W]. Planes have 8, 4, 2 and 1 bits, those whose sum is ``bits``, lowest bits first.
            Each is a dense bit stream.
        bits: width of a code, 2 to 8.
        count: codes wanted of each row; count * bits <= 32 * W.

    Returns:
        uint8 [.., count].
    """
    if is_outline(words):
        return outline((*words.shape[:-1], count), np.uint8)
    blocks, leading = -(-count // 32), words.shape[:-1]
    padded = np.zeros((*leading, blocks * bits), words.dtype)
    padded[..., : words.shape[-1]] = words
    padded = padded.reshape(*leading, blocks, bits)
    codes, at = np.zeros((*leading, blocks, 32), np.uint8), 0
    for width in (width for width in (8, 4, 2, 1) if bits & width):
        codes |= unpack_words(padded[..., at : at + width], width, 32) << np.uint8(at)
        at += width
    return codes.reshape(*leading, blocks * 32)[..., :count]


def unpack_nibbles(octets: np.ndarray) -> np.ndarray:
    """uint8 [.., B] -> uint8 [.., 2 B], low nibble first."""
    if is_outline(octets):
        return outline((*octets.shape[:-1], 2 * octets.shape[-1]), np.uint8)
    out = np.empty(octets.shape, "<u2")
    source, pairs = np.ascontiguousarray(octets).reshape(-1), out.reshape(-1)
    # by pieces that stay in the cache: three times as fast as whole matrices
    step = 1 << 15
    shifted = np.empty(min(step, len(pairs)), "<u2")
    for at in range(0, len(pairs), step):
        piece = pairs[at : at + step]
        piece[:] = source[at : at + step]
        piece |= np.left_shift(piece, 4, out=shifted[: len(piece)])
        piece &= 0x0F0F
    return out.view(np.uint8)


def as_e4m3(codes: np.ndarray, exponent_bits: int) -> np.ndarray:
    """Return the e4m3 codes of numbers of 6 bits (OCP Microscaling Formats v1.0, 5.3.2).

    Args:
        codes: uint8, a sign, ``exponent_bits`` of exponent, then mantissa: e2m3 or e3m2.
    """
    if is_outline(codes):
        return codes
    code, mantissa_bits = np.arange(64), 5 - exponent_bits
    exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
    whole = np.where(exponent, (1 << mantissa_bits) + mantissa, mantissa).astype(np.float32)
    magnitude = np.ldexp(whole, np.maximum(exponent, 1) - (1 << exponent_bits - 1) + 1 - mantissa_bits)
    return np.where(code & 32, -magnitude, magnitude).astype(SCALE_DTYPES["e4m3"]).view(np.uint8)[codes]


def in_order(codes: np.ndarray, perm: np.ndarray | None) -> np.ndarray:
    """Return codes [N, K] with their columns in the order ``perm``; None: as they are."""
    return codes if perm is None or is_outline(codes) else np.take(codes, perm, axis=1)
