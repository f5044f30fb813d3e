"""CachedAttention's random inputs, what is expected of them, and the shapes that tests run, on CUDA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from support.cuda import cuda_kernels as cuda
from support.cuda.built import NUMPY, SM80, TORCH, UNIT, torch
from support.operators.specs import attention_spec

from quantmoe.custom_ops import reference
from quantmoe.custom_ops.op import AttentionSpec

DEVICE = "cuda"


# The kernels round queries, weights and the output to 16 bits, each uniform in half an ulp: at most u / sqrt(3) of the
# norm where scores differ by about 1 and values are independent, as here; together u. Sums are of f32.
ALL, EACH = 1.5, 4.0  # units, of all values and of one head of a token, of whose norm cancellation may leave half


@dataclass(frozen=True)
class Inputs:
    """CachedAttention's, random; slots that no token has, and tokens that do not count, are NaN, or 0x7f of codes."""

    spec: AttentionSpec
    dtype: str
    tensors: tuple[np.ndarray, ...]  # qkv, past_key, past_value, rows, cos, sin, q_norm, k_norm, sinks
    length: int
    selected: np.ndarray | None = None

    @classmethod
    def make(
        cls,
        spec: AttentionSpec,
        dtype: str,
        rows: list[tuple[int, int, int]],
        tokens: int,
        slots: int,
        length: int = 0,
        cache_format: str = "none",
    ) -> Inputs:
        """cache_format: with scales by which the largest of the numbers saturate."""
        if cache_format != "none":
            one = 1.0 if cache_format == "fp8_e4m3" else 3.0
            spec = replace(spec, cache_format=cache_format, k_scale=0.0071 * one, v_scale=0.0058 * one)
        rng = np.random.default_rng(7)
        batch, heads, groups, d = len(rows), spec.num_heads, spec.kv_num_heads, spec.head_size
        v = spec.v_head_size

        def values(*shape: int) -> np.ndarray:
            return rng.normal(0, 1, shape).astype(np.float32).astype(NUMPY[dtype])

        qkv = values(batch, tokens, spec.gates_size + (heads + groups) * d + (0 if spec.key_split else groups * v))
        past = [values(batch, groups, slots, width) for width in spec.cache_widths]
        for b, (begin, count, before) in enumerate(rows):
            qkv[b, :begin] = qkv[b, begin + count :] = np.nan
            for cache in past:
                cache[b, :, before:] = np.nan
        if cache_format != "none":
            scales = spec.k_scale, spec.v_scale
            past = [reference.encode_cache(spec, x, s, x.dtype) for x, s in zip(past, scales, strict=True)]
            for b, (*_, before) in enumerate(rows):
                for cache in past:
                    cache[b, :, before:] = 0x7F
        angles = rng.uniform(-np.pi, np.pi, (batch, tokens, spec.rotary_size // 2))
        sizes = {"none": (0, 0), "head": (d, d), "row": (heads * d, groups * d)}[spec.qk_norm]
        norms = [rng.uniform(0.5, 1.5, n).astype(np.float32) for n in sizes]
        sinks = np.where(rng.uniform(size=heads) < 0.5, rng.normal(0, 2, heads), -np.inf).astype(np.float32)
        turn = [f(angles).astype(np.float32) for f in (np.cos, np.sin)]
        return cls(spec, dtype, (qkv, *past, np.array(rows, np.int32), *turn, *norms, sinks), length)

    def on_device(self) -> list[Any]:
        def tensor(x: np.ndarray):
            if x.dtype.itemsize == 2:
                return torch.from_numpy(x.view(np.int16).copy()).view(TORCH[self.dtype]).to(DEVICE)
            return torch.from_numpy(x.copy()).to(DEVICE)

        return [tensor(x) for x in self.tensors]

    def run(self) -> list[np.ndarray]:
        """output, present_key and present_value as float64; twice, with the same bytes."""
        found = []
        for _ in range(2):
            inputs = self.on_device()
            lists = None if self.selected is None else torch.from_numpy(self.selected).to(DEVICE)
            results = cuda.attention(self.spec, *inputs[:4], self.length, *inputs[4:], selected=lists)
            found.append([r.cpu() for r in results])
        for one, two in zip(*found, strict=True):
            assert torch.equal(one.view(torch.uint8), two.view(torch.uint8)), "two runs differ"
        if self.spec.cache_format != "none":
            return [found[0][0].double().numpy(), *self.decoded([r.numpy() for r in found[0][1:]])]
        return [r.float().numpy().astype(np.float64) for r in found[0]]

    def decoded(self, caches: list[np.ndarray]) -> list[np.ndarray]:
        scales = self.spec.k_scale, self.spec.v_scale
        return [reference.decode_cache(self.spec, x, s) for x, s in zip(caches, scales, strict=True)]

    def want(self) -> list[np.ndarray]:
        """What the reference says; of slots that hold nothing NaN if the cache stays where it is, else 0."""
        qkv, key, value, rows = self.tensors[:4]
        given = (self.spec, qkv, key, value, rows, self.length, *self.tensors[4:])
        found = reference.attention(*given, selected=self.selected)
        if self.length <= key.shape[2]:
            for b, (_, count, past) in enumerate(rows):
                for cache in found[1:]:
                    cache[b, :, past + count :] = np.nan if self.spec.cache_format == "none" else 0x7F
        return [found[0].astype(np.float64), *self.decoded(list(found[1:]))]


def close(got: np.ndarray, want: np.ndarray, unit: float, heads: int, apart: np.ndarray | None = None) -> None:
    """apart: [B, heads], those to which no bound of one head applies."""
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert (got[want.any(2) == 0] == 0).all()  # tokens that do not count
    size = max(np.linalg.norm(want), 1e-30)
    assert np.linalg.norm(got - want) < ALL * unit * size, f"{np.linalg.norm(got - want) / size / unit:.2f} units"
    got, want = (x.reshape(-1, x.shape[2] // heads) for x in (got, want))
    rows = np.linalg.norm(got - want, axis=1) / np.maximum(np.linalg.norm(want, axis=1), 1e-30)
    if apart is not None:
        rows[np.broadcast_to(apart[:, None], (len(apart), rows.size // apart.size, heads)).ravel()] = 0
    assert rows.max() < EACH * unit, f"row {rows.argmax()}: {rows.max() / unit:.2f} units"


def check(inputs: Inputs) -> None:
    check_results(inputs, inputs.run())


def check_results(inputs: Inputs, results: list[np.ndarray]) -> None:
    with np.errstate(invalid="ignore"):
        output, *present = inputs.want()
    got, *caches = results
    unit = UNIT[inputs.dtype]
    spec, apart = inputs.spec, None
    if spec.cache_format != "none":  # another code moves few scores, by more than roundings of 16 bits do
        other = [(cache != want) & np.isfinite(want) for cache, want in zip(caches, present, strict=True)]
        apart = np.repeat(other[0].any((2, 3)) | other[1].any((2, 3)), spec.num_heads // spec.kv_num_heads, 1)
    close(got, output, unit, spec.num_heads, apart)
    # f32 before it is rounded: rarely the next value. Of e4m3 that is 1/8 further, or 2^-9 times the scale.
    rtol, atol = 2 * unit, unit * 2**-10
    if spec.cache_format != "none":
        rtol, atol = 0.13, max(spec.k_scale, spec.v_scale) * (2.0**-8 if spec.cache_format == "fp8_e4m3" else 1.01)
    for cache, want in zip(caches, present, strict=True):
        np.testing.assert_allclose(cache, want, rtol=rtol, atol=atol)
        assert (cache != want)[np.isfinite(want)].sum() <= 2 + want.size // 1000


SPEC = attention_spec(8, 2, 64, rotary_size=64)
HEADS = {
    "qwen3": attention_spec(32, 4, 128, rotary_size=128, qk_norm="head"),
    "each its own": attention_spec(4, 4, 64, rotary_size=64),
    "three of 96": attention_spec(6, 2, 96, rotary_size=96),
    "five": attention_spec(20, 4, 128, rotary_size=64),
    "llama 4": attention_spec(10, 2, 128, rotary_size=128, rotary_interleaved=1, qk_norm="head", chunk_size=80),
    "sixteen": attention_spec(16, 1, 64, rotary_size=64),
    "twenty": attention_spec(20, 1, 128, rotary_size=128),
    "qwen3.5": attention_spec(16, 2, 256, rotary_size=64, qk_norm="head"),
    "192": attention_spec(12, 2, 192, rotary_size=128, rotary_interleaved=1, sliding_window=70),
    "deepseek": attention_spec(8, 8, 192, v_head_size=128, rotary_size=64, rotary_interleaved=1),
    "mimo": attention_spec(32, 4, 192, v_head_size=128, rotary_size=64, sliding_window=128),
    "norm-row of 256": attention_spec(6, 3, 256, rotary_size=256, qk_norm="row"),
    "interleaved": replace(SPEC, rotary_interleaved=1),
    "partial": replace(SPEC, rotary_size=24),
    "partial-interleaved": replace(SPEC, rotary_size=24, rotary_interleaved=1),
    "no rotary": replace(SPEC, rotary_size=0),
    "norm-row": replace(SPEC, qk_norm="row"),
    "softcap": replace(SPEC, softcap=2.0),
    "window": replace(SPEC, sliding_window=37),
    "window-1": replace(SPEC, sliding_window=1),
    "window-128": replace(SPEC, sliding_window=128),
    "chunk": replace(SPEC, chunk_size=80),
    "window-chunk": replace(SPEC, sliding_window=50, chunk_size=128),
    "scale": replace(SPEC, scale=0.3),
    "gated": replace(SPEC, gated=1),
    "gated, norm-row": replace(SPEC, gated=1, qk_norm="row"),
    "qwen3.5, gated": attention_spec(16, 2, 256, rotary_size=64, qk_norm="head", gated=1),
    "deepseek, gated": attention_spec(8, 8, 192, v_head_size=128, rotary_size=64, gated=1),
}
LATENT = attention_spec(
    16, 1, 576, v_head_size=512, key_split=288, rotary_size=64, rotary_interleaved=1, scale=192**-0.5
)
LATENTS = {
    "deepseek-v2-lite": LATENT,
    "deepseek-v3": replace(LATENT, num_heads=128),
    "glm-4.7-flash": replace(LATENT, num_heads=20, rotary_interleaved=0),
    "five": replace(LATENT, num_heads=5, rotary_size=0, softcap=2.0),
    "of two": replace(LATENT, num_heads=24, kv_num_heads=2, rotary_size=576, rotary_interleaved=0),
    "window": replace(LATENT, num_heads=12, sliding_window=37, rotary_size=128),
    "window-chunk": replace(LATENT, num_heads=70, sliding_window=50, chunk_size=128, rotary_size=112),
}


#: of keys that are their values
EQUAL = attention_spec(64, 1, 512, rotary_size=64, rotary_interleaved=1, qk_norm="head")
EQUALS = {
    "deepseek-v4": replace(EQUAL, compress_rate=4, sliding_window=37),
    "deepseek-v4, heavily": replace(EQUAL, compress_rate=30, sliding_window=64),
    "deepseek-v4, a window": replace(EQUAL, key_split=256, sliding_window=37),
    "glm-5.3-flash": replace(EQUAL, key_split=256, rotary_size=0, qk_norm="none"),
    "ten": replace(EQUAL, num_heads=10, compress_rate=3, rotary_size=512, rotary_interleaved=0, softcap=2.0, gated=1),
    "all keys": replace(EQUAL, num_heads=20, compress_rate=1, rotary_size=22, qk_norm="none"),
    "of two": replace(EQUAL, num_heads=40, kv_num_heads=2, compress_rate=5, sliding_window=1, rotary_interleaved=0),
    "of two latents": replace(EQUAL, num_heads=24, kv_num_heads=2, key_split=256, rotary_size=34),
}


# rows, tokens, slots of past
CALLS = {
    "decode": ([(0, 1, 150)], 1, 160),
    "decode at 0": ([(0, 1, 0)], 1, 64),
    "decode, the last slot": ([(0, 1, 127)], 1, 128),
    "prefill": ([(0, 75, 0)], 75, 80),
    "prefill after": ([(0, 40, 130)], 40, 170),
    "ragged decode": ([(0, 1, 63), (0, 1, 64), (0, 0, 9), (0, 1, 0), (0, 1, 199)], 1, 200),
    "ragged prefill": ([(0, 20, 0), (7, 13, 100), (0, 0, 5), (2, 9, 64)], 20, 130),
}


#: of one key for all heads; and what a GPU without wgmma runs, with much shared memory, and with little
LATENT_DEVICES = {"wgmma": cuda.H200, "mma": SM80, "mma, two stages": cuda.Device(86, 84, 102400)}
