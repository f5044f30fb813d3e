"""CachedAttention on CUDA against reference.py, through the C ABI. Launches are skipped where no GPU is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from specs import attention_spec

from quantmoe.custom_ops import cuda, reference
from quantmoe.custom_ops.op import AttentionSpec

torch = pytest.importorskip("torch")
try:
    cuda.library()
except FileNotFoundError:
    pytest.skip("no CUDA library was built (QUANTMOE_CUDA)", allow_module_level=True)
import ml_dtypes  # noqa: E402

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICE = "cuda"
SM80 = cuda.Device(80, 108, 167936)
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16}
NUMPY = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
UNIT = {"f16": 2.0**-11, "bf16": 2.0**-8}  # half an ulp
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

        qkv = values(batch, tokens, (heads + groups) * d + (0 if spec.key_split else groups * v))
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
            results = cuda.attention(self.spec, *inputs[:4], self.length, *inputs[4:])
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
        found = reference.attention(self.spec, qkv, key, value, rows, self.length, *self.tensors[4:])
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


@gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", HEADS)
def test_against_the_reference(name: str, call: str, dtype: str) -> None:
    check(Inputs.make(HEADS[name], dtype, *CALLS[call]))


#: of one key for all heads; and what a GPU without wgmma runs, with much shared memory, and with little
LATENT_DEVICES = {"wgmma": cuda.H200, "mma": SM80, "mma, two stages": cuda.Device(86, 84, 102400)}
LATENT_CALLS = CALLS | {
    "eight": ([(0, 8, 61), (2, 5, 120), (0, 0, 3)], 8, 200),
    "prefill of 33": ([(0, 33, 0), (1, 32, 64)], 33, 100),
}


@gpu
@pytest.mark.parametrize(
    ("device", "dtype"), [("wgmma", "f16"), ("wgmma", "bf16"), ("mma", "bf16"), ("mma, two stages", "f16")]
)
@pytest.mark.parametrize("call", LATENT_CALLS)
@pytest.mark.parametrize("name", LATENTS)
def test_latent(monkeypatch: pytest.MonkeyPatch, name: str, call: str, dtype: str, device: str) -> None:
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    check(Inputs.make(LATENTS[name], dtype, *LATENT_CALLS[call]))


@gpu
@pytest.mark.parametrize("device", LATENT_DEVICES)
@pytest.mark.parametrize(("slots", "tokens"), [(5000, 1), (5000, 3), (9000, 1), (1500, 60)])
@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "glm-4.7-flash", "window"])
def test_long_latents(monkeypatch: pytest.MonkeyPatch, name: str, slots: int, tokens: int, device: str) -> None:
    """Many splits, more than 64 too."""
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    check(Inputs.make(LATENTS[name], "bf16", [(0, tokens, slots - tokens - 7)], tokens, slots))


@gpu
@pytest.mark.parametrize("slots", [0, 70])
@pytest.mark.parametrize("call", ["decode at 0", "decode", "prefill", "ragged prefill", "eight"])
@pytest.mark.parametrize("name", ["deepseek-v2-lite", "glm-4.7-flash"])
def test_a_latent_that_grows(name: str, call: str, slots: int) -> None:
    rows, tokens, _ = LATENT_CALLS[call]
    rows = [(begin, count, min(past, slots)) for begin, count, past in rows]
    check(Inputs.make(LATENTS[name], "f16", rows, tokens, slots, slots + 140))


@gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("device", LATENT_DEVICES)
@pytest.mark.parametrize("tokens", [4, 40])
def test_a_latent_that_is_no_number(monkeypatch: pytest.MonkeyPatch, tokens: int, device: str, bad: float) -> None:
    """It reaches the tokens that see it, all of them, and no others."""
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    inputs = Inputs.make(replace(LATENT, num_heads=20, sliding_window=30), "bf16", [(0, tokens, 100)], tokens, 200)
    inputs.tensors[0][0, -1, -3] = bad  # seen by the last token
    inputs.tensors[2][0, 0, 71, 5] = bad  # by the first
    inputs.tensors[1][0, 0, 72, 5] = bad  # by two; of a feature that is no value's
    with np.errstate(invalid="ignore"):
        want, *_ = inputs.want()
    got, *_ = inputs.run()
    assert not np.isfinite(want).all()
    assert np.isfinite(want).any()
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    got, want = got[np.isfinite(want)], want[np.isfinite(want)]
    assert np.linalg.norm(got - want) < ALL * UNIT["bf16"] * np.linalg.norm(want)


CODES = ["int8", "fp8_e4m3"]


@gpu
@pytest.mark.parametrize("cache", CODES)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", HEADS)
def test_caches_of_codes(name: str, call: str, dtype: str, cache: str) -> None:
    check(Inputs.make(HEADS[name], dtype, *CALLS[call], cache_format=cache))


@gpu
@pytest.mark.parametrize("cache", CODES)
@pytest.mark.parametrize(("slots", "tokens"), [(5000, 1), (5000, 3), (1500, 60)])
@pytest.mark.parametrize("name", ["qwen3", "window-128", "qwen3.5", "mimo"])
def test_long_caches_of_codes(name: str, slots: int, tokens: int, cache: str) -> None:
    check(Inputs.make(HEADS[name], "bf16", [(0, tokens, slots - tokens - 7)], tokens, slots, cache_format=cache))


@gpu
@pytest.mark.parametrize("cache", CODES)
@pytest.mark.parametrize("call", ["decode at 0", "decode", "prefill", "ragged prefill"])
def test_a_cache_of_codes_that_grows(call: str, cache: str) -> None:
    rows, tokens, _ = CALLS[call]
    rows = [(begin, count, min(past, 70)) for begin, count, past in rows]
    check(Inputs.make(HEADS["mimo"], "bf16", rows, tokens, 70, 170, cache))


@gpu
@pytest.mark.parametrize("call", ["decode", "ragged decode", "prefill", "prefill after", "ragged prefill"])
@pytest.mark.parametrize("name", ["qwen3", "three of 96", "softcap", "qwen3.5", "192", "deepseek"])
def test_int8_on_mma_sync(monkeypatch: pytest.MonkeyPatch, name: str, call: str) -> None:
    monkeypatch.setattr(cuda, "query", lambda _: SM80)
    check(Inputs.make(HEADS[name], "bf16", *CALLS[call], cache_format="int8"))


@gpu
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("scale", [2.0**-40, 1.0, 2.0**40])
@pytest.mark.parametrize("cache", CODES)
def test_codes_of_any_scale(cache: str, scale: float, tokens: int) -> None:
    """New keys vanish or saturate."""
    spec = replace(HEADS["three of 96"], rotary_size=0)
    inputs = Inputs.make(spec, "bf16", [(0, tokens, 50)], tokens, 100, cache_format=cache)
    inputs.tensors[0][0, 0, 6 * 96 : 6 * 96 + 4] = [np.inf, -np.inf, 1e30, -0.0]  # keys: saturate
    inputs = replace(
        inputs, spec=replace(inputs.spec, scale=inputs.spec.scale / scale, k_scale=inputs.spec.k_scale * scale)
    )
    check(inputs)


@gpu
@pytest.mark.parametrize("tokens", [2, 40])
def test_a_code_that_is_no_number(tokens: int) -> None:
    """It reaches the tokens that see it and no others."""
    spec, at = attention_spec(8, 2, 64, rotary_size=64, sliding_window=30), tokens // 2
    inputs = Inputs.make(spec, "bf16", [(0, tokens, 100)], tokens, 200, cache_format="fp8_e4m3")
    inputs.tensors[0][0, at, -3] = np.nan  # of the last head's values
    inputs.tensors[2][0, 0, 95, 5] = 0xFF
    with np.errstate(invalid="ignore"):
        want, *_ = inputs.want()
    got, *_ = inputs.run()
    assert np.array_equal(np.isnan(got), np.isnan(want))
    assert np.isnan(want).any()
    assert not np.isnan(want).all()


@pytest.mark.parametrize(
    ("cache", "device", "message"),
    [
        ("int8_token", cuda.H200, "cache_format is .int8_token., the CUDA kernels take none, int8 and fp8_e4m3"),
        ("fp8_e4m3", SM80, "cache_format is .fp8_e4m3., which needs compute capability 9.0 or later, found 8.0"),
    ],
)
def test_codes_that_do_not_run_are_named(cache: str, device: cuda.Device, message: str) -> None:
    spec = replace(SPEC, cache_format=cache)
    with pytest.raises(ValueError, match=message):
        cuda.plan_attention(cuda.attention_problem(spec, "bf16", 1, 1, 64, 64), device)
    assert bool(cuda.refusal(spec)) == (cache == "int8_token")


@gpu
@pytest.mark.parametrize("call", ["decode", "ragged decode", "prefill", "prefill after", "ragged prefill"])
@pytest.mark.parametrize("name", ["qwen3", "norm-row", "window-chunk", "softcap", "qwen3.5", "192", "deepseek"])
def test_on_mma_sync(monkeypatch: pytest.MonkeyPatch, name: str, call: str) -> None:
    """What a GPU without wgmma runs."""
    monkeypatch.setattr(cuda, "query", lambda _: SM80)
    check(Inputs.make(HEADS[name], "bf16", *CALLS[call]))


@gpu
@pytest.mark.parametrize("slots", [0, 70])
@pytest.mark.parametrize("call", ["decode at 0", "decode", "prefill", "ragged prefill"])
@pytest.mark.parametrize("name", ["interleaved", "mimo"])
def test_a_cache_that_grows(name: str, call: str, slots: int) -> None:
    """present is other memory, in which what past has is copied."""
    rows, tokens, _ = CALLS[call]
    rows = [(begin, count, min(past, slots)) for begin, count, past in rows]
    check(Inputs.make(HEADS[name], "bf16", rows, tokens, slots, slots + 100))


@gpu
@pytest.mark.parametrize(("slots", "tokens"), [(5000, 1), (5000, 3), (1500, 60)])
@pytest.mark.parametrize("name", ["qwen3", "window-128", "qwen3.5", "mimo"])
def test_long(name: str, slots: int, tokens: int) -> None:
    """Many splits, and more splits than there are stages in a window."""
    check(Inputs.make(HEADS[name], "f16", [(0, tokens, slots - tokens - 7)], tokens, slots))


@gpu
@pytest.mark.parametrize("tokens", [1, 2])
def test_batch_of_64(tokens: int) -> None:
    rows = [(b % tokens, tokens - b % tokens, 37 * b % 500) for b in range(64)]
    check(Inputs.make(HEADS["five"], "bf16", rows, tokens, 512))


@gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("device", [cuda.H200, SM80], ids=["wgmma", "mma"])
@pytest.mark.parametrize("tokens", [2, 40])
@pytest.mark.parametrize("size", [64, 256])
def test_a_value_that_is_no_number(
    monkeypatch: pytest.MonkeyPatch, size: int, tokens: int, device: cuda.Device, bad: float
) -> None:
    """It reaches the tokens that see it and no others."""
    monkeypatch.setattr(cuda, "query", lambda _: device)
    spec, at = attention_spec(8, 2, size, rotary_size=64, sliding_window=30), tokens // 2
    inputs = Inputs.make(spec, "bf16", [(0, tokens, 100)], tokens, 200)
    inputs.tensors[0][0, at, -3] = bad  # of the last head's values
    inputs.tensors[2][0, 0, 95, 5] = bad
    with np.errstate(invalid="ignore"):
        want, *_ = inputs.want()
    got, *_ = inputs.run()
    assert not np.isfinite(want).all()
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    got, want = got[np.isfinite(want)], want[np.isfinite(want)]
    assert np.linalg.norm(got - want) < ALL * UNIT["bf16"] * np.linalg.norm(want)


@gpu
def test_a_query_that_is_no_number() -> None:
    """Its head of its token is NaN, and nothing else."""
    inputs = Inputs.make(SPEC, "f16", [(0, 20, 60)], 20, 80)
    inputs.tensors[0][0, 4, 3 * 64] = np.nan
    got, *_ = inputs.run()
    lost = np.zeros(got.shape, bool)
    lost[0, 4, 3 * 64 : 4 * 64] = True
    np.testing.assert_array_equal(np.isnan(got), lost)


@gpu
@pytest.mark.parametrize("spec", [SPEC, LATENT], ids=["grouped", "latent"])
@pytest.mark.parametrize(
    "bad", [(-1, 1, 5), (0, -1, 5), (0, 1, -1), (1, 2, 5), (0, 1, 64), (0, 2, 63), (0, 1, 2**31 - 1)]
)
def test_rows_that_are_not_there(bad: tuple[int, int, int], spec: AttentionSpec) -> None:
    """The row's output is NaN, its cache and the other rows are untouched."""
    good = Inputs.make(spec, "f16", [(0, 2, 30), (0, 2, 40)], 2, 64)
    want = good.run()
    good.tensors[3][0] = bad
    got = good.run()
    assert np.isnan(got[0][0]).all()
    np.testing.assert_array_equal(got[0][1], want[0][1])
    for found, before in zip(got[1:], good.tensors[1:3], strict=True):
        np.testing.assert_array_equal(found[0], before[0].astype(np.float64))


@gpu
@pytest.mark.parametrize("spec", [HEADS["qwen3"], LATENT, LATENTS["deepseek-v3"]], ids=["qwen3", "latent", "wgmma"])
def test_a_graph_serves_every_position(spec: AttentionSpec) -> None:
    """One capture, replayed with other tokens and lengths, gives the bytes of calls without it."""
    made = [Inputs.make(spec, "bf16", [(0, 1, past), (0, 1, past // 3)], 1, 700) for past in (5, 300, 699)]
    wanted = []
    for inputs in made:
        t = inputs.on_device()
        wanted.append([r.clone() for r in cuda.attention(spec, *t[:4], 0, *t[4:])])
    fixed = made[0].on_device()
    p = cuda.attention_problem(spec, "bf16", 2, 1, 700, 700)
    chosen = cuda.plan_attention(p, cuda.query())
    output = torch.empty_like(wanted[0][0])
    workspace = torch.empty(chosen.workspace_bytes, dtype=torch.uint8, device=DEVICE)

    def launch() -> None:
        cuda.launch_attention(p, chosen, *fixed, output, fixed[1], fixed[2], workspace)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for inputs, want in zip(made, wanted, strict=True):
        for to, x in zip(fixed, inputs.on_device(), strict=True):
            to.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        for found, x in zip((output, fixed[1], fixed[2]), want, strict=True):
            assert torch.equal(found.view(torch.int16), x.view(torch.int16))


def plan(spec: AttentionSpec, *shape: int, dtype: str = "f16", device: cuda.Device = cuda.H200) -> cuda.AttentionPlan:
    return cuda.plan_attention(cuda.attention_problem(spec, dtype, *shape), device)


def test_plans() -> None:
    qwen3 = HEADS["qwen3"]

    def few(*shape: int, spec: AttentionSpec = qwen3, device: cuda.Device = cuda.H200) -> tuple[int, int, int]:
        found = plan(spec, *shape, device=device)
        return found.tile_rows, found.splits, found.cluster

    assert few(1, 1, 2048, 2048) == (16, 16, 16)
    assert few(1, 1, 300, 300) == (16, 4, 4)
    assert few(1, 1, 190, 190) == few(1, 1, 4096, 4096, spec=HEADS["window-128"]) == (16, 1, 1)
    assert few(2, 1, 2048, 2048) == (16, 8, 8)
    assert few(2, 1, 4096, 4096) == (16, 8, 8)
    assert few(2, 1, 8192, 8192) == (16, 16, 1)  # a block of a cluster would read too much
    assert [plan(qwen3, 1, 1, n, n).stages for n in (2048, 16384, 40960)] == [3, 6, 6]
    assert plan(qwen3, 1, 1, 12288, 12288).stages == plan(HEADS["qwen3.5"], 8, 1, 4096, 4096).stages == 6
    assert plan(qwen3, 32, 1, 4096, 4096).stages == 6  # 128 blocks
    assert plan(qwen3, 64, 1, 4096, 4096).stages == 3
    assert few(1, 1, 40960, 40960) == (16, 33, 1)  # more than a cluster has
    assert few(8, 1, 512, 512) == (16, 4, 4)
    assert few(8, 1, 40960, 40960) == (16, 4, 4)  # no more splits than that
    assert plan(qwen3, 8, 1, 40960, 40960).stages == 3
    assert few(64, 1, 4096, 4096) == (16, 1, 1)
    assert few(1, 1, 2048, 2048, device=SM80) == (16, 16, 1)
    sm120 = cuda.Device(120, 170, 102400)  # too little shared memory to have a cluster of these heads
    assert few(1, 1, 2048, 2048, device=sm120) == (16, 16, 1)
    assert few(1, 1, 1024, 1024, spec=HEADS["sixteen"], device=sm120) == (16, 8, 8)
    assert few(1, 1, 2048, 2048, spec=HEADS["qwen3.5"]) == (16, 16, 16)
    assert (plan(qwen3, 1, 2048, 2048, 2048).tile_rows, plan(qwen3, 1, 2048, 2048, 2048).splits) == (128, 1)
    assert [plan(qwen3, 1, n, n, n).tile_rows for n in (512, 600)] == [64, 128]
    assert plan(qwen3, 1, 16, 4096, 4096).splits == 16  # of 8 tiles
    assert [plan(qwen3, 1, n, 4096, 4096).wgmma for n in (1, 2, 3, 300)] == [0, 0, 1, 1]
    assert plan(HEADS["three of 96"], 1, 300, 4096, 4096).wgmma == 0
    assert plan(qwen3, 1, 300, 4096, 4096, device=SM80).wgmma == 0
    assert [plan(HEADS[name], 1, 300, 300, 300, device=SM80).tile_rows for name in ("qwen3", "mimo")] == [128, 64]
    assert plan(qwen3, 1, 0, 64, 64).workspace_bytes == plan(qwen3, 0, 1, 64, 64).workspace_bytes == 0
    # With any number of multiprocessors at most what a plan for none says.
    for sms in (1, 28, 132, 188):
        for shape in ((1, 1, 2048, 2048), (2, 16, 0, 300), (1, 700, 0, 700)):
            of_none = plan(qwen3, *shape, device=cuda.Device(90, 0, 233472))
            assert plan(qwen3, *shape, device=cuda.Device(90, sms, 233472)).workspace_bytes <= of_none.workspace_bytes


def test_plans_of_latents() -> None:
    def found(heads: int, *shape: int, device: cuda.Device = cuda.H200) -> tuple[int, ...]:
        chosen = plan(replace(LATENT, num_heads=heads), *shape, device=device)
        assert chosen.cluster == 1
        assert bool(chosen.workspace_bytes) == (chosen.splits > 1)
        return chosen.wgmma, chosen.tile_rows, chosen.splits, chosen.stages

    assert found(16, 1, 1, 16384, 16384) == (0, 16, 128, 4)
    assert found(16, 1, 1, 2048, 2048) == (0, 16, 64, 4)
    assert found(16, 1, 1, 33, 33) == (0, 16, 2, 4)
    assert found(16, 1, 2, 16384, 16384) == (1, 64, 128, 2)
    assert found(128, 1, 1, 16384, 16384) == (1, 64, 65, 2)
    assert found(128, 1, 1, 2048, 2048) == (1, 64, 32, 2)
    assert found(128, 32, 1, 16384, 16384) == (1, 64, 2, 2)
    assert found(128, 1, 512, 512, 512) == (1, 64, 1, 2)
    assert found(128, 1, 1, 16384, 16384, device=SM80) == (0, 16, 13, 4)
    assert found(128, 1, 1, 16384, 16384, device=LATENT_DEVICES["mma, two stages"]) == (0, 16, 10, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_split": 64}, "head_size is 576, v_head_size 512 and key_split 64, of latent attention the CUDA kernels"),
        ({"head_size": 320, "v_head_size": 256}, "head_size is 320, v_head_size 256 and key_split 288, of latent"),
        ({"rotary_size": 24}, "rotary_size is 24, of latent attention the CUDA kernels take multiples of 16"),
        ({"qk_norm": "head"}, "qk_norm is .head., of latent attention the CUDA kernels take none"),
        ({"cache_format": "int8"}, "key_split is 288, expected 0 where cache_format is int8"),
    ],
)
def test_latents_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(replace(LATENT, **change), 1, 1, 64, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_size": 80, "v_head_size": 80}, "head_size is 80 and v_head_size 80, the CUDA kernels take 64, 96, 128"),
        ({"v_head_size": 128}, "head_size is 64 and v_head_size 128, the CUDA kernels take 64, 96, 128"),
        ({"kv_num_heads": 3}, "kv_num_heads is 3, expected a divisor of num_heads 8"),
        ({"kv_num_heads": 0}, "kv_num_heads is 0, expected 1 to 8"),
        ({"rotary_size": 66}, "rotary_size is 66, expected 0 to 64"),
        ({"rotary_size": 7}, "rotary_size is 7, expected an even number"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"chunk_size": -1}, "chunk_size is -1"),
        ({"rotary_interleaved": 2}, "rotary_interleaved is 2, expected 0 to 1"),
        ({"softcap": -1.0}, "softcap is -1, expected 0 or a positive number"),
        ({"norm_epsilon": float("inf")}, "norm_epsilon is inf, expected 0 or a positive number"),
        ({"scale": float("nan")}, "scale is nan, expected a number"),
        ({"op_version": 9}, "op_version is 9"),
    ],
)
def test_attributes_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(replace(SPEC, **change), 1, 1, 64, 64)


def test_shapes_that_are_refused() -> None:
    for shape, message in (
        ((1, 1, 64, 63), "the cache has 64 slots before and 63 after"),
        (
            (2, 2**26, 64, 64),
            "a batch of 2 with 67108864 tokens and 64 slots each, the CUDA kernels take up to 67108863",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            plan(SPEC, *shape)
    with pytest.raises(ValueError, match="qkv is of type 0"):
        plan(SPEC, 1, 1, 64, 64, dtype="f32")
    with pytest.raises(ValueError, match=r"compute capability 7\.5"):
        plan(SPEC, 1, 1, 64, 64, device=cuda.Device(75, 40, 65536))


def test_present_in_pasts_memory_cannot_grow() -> None:
    p = cuda.attention_problem(SPEC, "f16", 1, 1, 64, 65)
    tensors = [torch.zeros(1) for _ in range(13)]
    tensors[10], tensors[11] = tensors[1], tensors[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))
        with pytest.raises(ValueError, match="present is past's memory, whose 64 slots are to become 65"):
            cuda.launch_attention(p, cuda.plan_attention(p), *tensors)


@pytest.mark.parametrize("sizes", [(64, 64), (96, 96), (128, 128), (48, 48), (192, 128), (256, 256), (128, 192)])
def test_the_exporter_knows_what_the_plan_takes(sizes: tuple[int, int]) -> None:
    """cuda.refusal, which needs no library, says what the plan says."""
    spec = replace(SPEC, head_size=sizes[0], v_head_size=sizes[1], rotary_size=32)
    found = ""
    try:
        plan(spec, 1, 1, 64, 64)
    except ValueError as error:
        found = str(error)
    assert cuda.refusal(spec) == found
