"""The kernel that chooses tokens against the sampler of the CPU, whose probabilities are f64.

A number of [0, 1) decides which token is chosen. Each token that the sampler keeps has an interval of such numbers. One
in its middle must choose it, one at an end it or its neighbour. Weights are rounded to 2^-40 of the likeliest's. So
ends move by at most 2^-41 for each token before them. Sums are exact here, and rounded in the sampler: where a sum
would be exactly top_p, each may keep one token more than the other.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from quantmoe.custom_ops.c_calls import checked
from quantmoe.exporter.folder.sampling_options import Sampling
from quantmoe.runtime import device
from quantmoe.runtime.choosing import device_sampling
from quantmoe.runtime.choosing.sampling import Penalties, Sampler, probabilities

torch = pytest.importorskip("torch")
try:
    LIBRARY = device.library()
except (OSError, AttributeError):
    pytest.skip("no CUDA library was built (QUANTMOE_CUDA)", allow_module_level=True)
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

DTYPES = {"f32": (0, torch.float32), "f16": (1, torch.float16), "bf16": (2, torch.bfloat16)}
TEXT = [5, 3, 5, 9, 5, 3, 7, 5, 3]


@dataclass
class Call:
    """A launch: a row for each number, all with the same logits and text."""

    logits: Any
    numbers: list[float]
    sampling: Sampling | None = None
    text: list[int] = field(default_factory=lambda: list(TEXT))
    answer: int = 0  # so many of the text's last tokens were chosen
    past: list[int] | None = None
    mask: int = 0  # columns; 0: no inputs are written
    before: int = -1
    allowed: Any = None  # bool [rows, vocabulary]: tokens that may come

    def run(self) -> list[int]:
        how, batch = self.sampling or Sampling(temperature=0), len(self.numbers)
        kind = next(code for code, dtype in DTYPES.values() if dtype == self.logits.dtype)
        vocabulary, longest = self.logits.shape[-1], len(self.text) + 1
        past = self.past or [len(self.text)] * batch
        problem = device_sampling.Problem(
            kind, batch, vocabulary, how.top_k, how.no_repeat_ngram_size,
            how.temperature, how.top_p, how.min_p,
            how.repetition_penalty, how.presence_penalty, how.frequency_penalty,
            self.mask, longest, max(self.before, *past), self.before,
        )  # fmt: skip
        held = {
            "logits": self.logits.expand(batch, -1).contiguous().cuda(),
            "uniform": torch.tensor(self.numbers, dtype=torch.float64),
            "past": torch.tensor(past, dtype=torch.int32),
            "chosen": torch.full((batch,), -9, dtype=torch.int32),
            "workspace": torch.full((LIBRARY.qm_cuda_choice_bytes(ctypes.byref(problem)),), 77, dtype=torch.uint8),
        }
        if how.logit_bias:
            held["bias"] = torch.zeros(vocabulary, dtype=torch.float64)
            held["bias"][list(how.logit_bias)] = torch.tensor([*how.logit_bias.values()], dtype=torch.float64)
        if self.allowed is not None:
            bits = np.packbits(np.pad(self.allowed, [(0, 0), (0, -vocabulary % 32)]), axis=1, bitorder="little")
            held["allowed"] = torch.from_numpy(bits.view(np.int32).copy())
        if how.repetition_penalty != 1 or how.presence_penalty or how.frequency_penalty:
            held["counts"] = torch.zeros(batch, vocabulary, dtype=torch.int32)
            for at, token in enumerate(self.text):
                held["counts"][:, token] |= 1
                held["counts"][:, token] += 2 * (at >= len(self.text) - self.answer)
        if how.no_repeat_ngram_size:
            held["history"] = torch.tensor([[*self.text, 0]] * batch, dtype=torch.int32)
        if self.mask:
            held["ids"], held["positions"] = torch.full((2, batch), -5, dtype=torch.int64)
            held["mask"] = (torch.arange(self.mask) < torch.tensor(past)[:, None] - 1).long()
            if self.before >= 0:
                held["mask"][:, self.before] = 1
        self.held = {name: tensor.cuda().contiguous() for name, tensor in held.items()}
        tensors = device_sampling.Tensors(**{name: tensor.data_ptr() for name, tensor in self.held.items()})
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        checked(LIBRARY.qm_cuda_launch_choice, ctypes.byref(problem), ctypes.byref(tensors), stream)
        return self.held["chosen"].tolist()


def changed(logits: Any, sampling: Sampling, text: list[int], answer: int) -> np.ndarray:
    """Logits with penalties, f32, as Sampler has them."""
    values = logits.float().numpy()
    if not sampling.changes_logits:
        return values
    penalties = Penalties(sampling, text[: len(text) - answer])
    for token in text[len(text) - answer :]:
        penalties.add(token)
    return penalties(values).astype(np.float32)


def check(logits: Any, sampling: Sampling, most: int = 64, answer: int = 0) -> None:
    """Numbers in the middles of the intervals, a few a launch and all at once, and at random."""
    ids, found = probabilities(changed(logits, sampling, TEXT, answer), sampling)
    ends = np.cumsum(found)
    rng = np.random.default_rng(0)
    wide = np.flatnonzero(found > 1e-9)
    at = np.sort([*rng.permutation(wide)[: most - 2], wide[0], wide[-1]])
    numbers = ((ends - found / 2) / ends[-1])[at]
    for part in (numbers, numbers[:1], numbers[-3:]):
        expected = ids[np.searchsorted(ends, part * ends[-1], side="right")].tolist()
        assert Call(logits, part.tolist(), sampling, answer=answer).run() == expected
    numbers = np.array([0.0, 1 - 2.0**-53, *rng.random(100)])
    chosen = Call(logits, numbers.tolist(), sampling, answer=answer).run()
    assert Call(logits, numbers.tolist(), sampling, answer=answer).run() == chosen
    slack = len(logits) * 2.0**-41 / found.max() + 1e-12
    for number, token in zip(numbers, chosen, strict=True):
        place = int(np.searchsorted(ids, token))
        assert ids[place] == token
        assert ends[place] - found[place] - slack <= number * ends[-1] <= ends[place] + slack


def normal(vocabulary: int, dtype: str, scale: float = 3.0, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(vocabulary, generator=generator) * scale).to(DTYPES[dtype][1])


SAMPLINGS = [
    Sampling(1.0, 0),
    Sampling(0.7, 20, 0.8),
    Sampling(1.0, 1),
    Sampling(0.6, 50),
    Sampling(1.5, 384, 0.99),
    Sampling(1.0, 385, 0.5),
    Sampling(1.0, 0, 0.95),
    Sampling(0.3, 0, 0.9),
    Sampling(5.0, 0, 0.999),
    Sampling(1.0, 0, 1e-9),
    Sampling(1.0, 0, min_p=0.05),
    Sampling(2.0, 100, 0.9, min_p=0.01),
    Sampling(1.0, 0, min_p=1.0),
    Sampling(1e-30, 0),
    Sampling(1e30, 0),
    Sampling(1.0, 10**6, 0.9),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_probabilities_are_the_samplers(dtype: str, sampling: Sampling) -> None:
    for vocabulary in (151_936, 1_000, 3, 1):
        check(normal(vocabulary, dtype), sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("values", [1, 2, 40])
def test_equal_logits(sampling: Sampling, values: int) -> None:
    """Top-k keeps all tokens with equal logits, top-p the last ones. No sum is exactly this top_p."""
    if sampling.top_p < 1:
        sampling = replace(sampling, top_p=sampling.top_p * 0.99998765)
    for vocabulary in (2_049, 50_000):
        check(torch.from_numpy(np.arange(vocabulary) * 7919 % values / 4).float(), sampling)


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75, 0.9])
def test_a_sum_that_is_top_p(top_p: float) -> None:
    """Four tokens have equal logits, whose sums are exact in f64."""
    check(torch.tensor([1.0, -90.0, 1.0, 1.0, 1.0]), Sampling(1.0, 0, top_p))


@pytest.mark.parametrize("sampling", [None, *SAMPLINGS], ids=str)
def test_one_token_is_left(sampling: Sampling | None) -> None:
    for place in (0, 777, 50_000):
        logits = normal(50_001, "f32")
        bias = {token: -np.inf for token in range(50_001) if token != place}
        how = Sampling(*(getattr(sampling or Sampling(0), name) for name in ("temperature", "top_k", "top_p")),
                       min_p=0 if sampling is None else sampling.min_p, logit_bias=bias)  # fmt: skip
        assert Call(logits, [0.0, 0.5, 0.999], how).run() == [place] * 3
    bias[place] = -np.inf
    how = Sampling(how.temperature, how.top_k, logit_bias=bias)
    assert Call(logits, [0.5], how).run() == [-2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite(dtype: str, bad: float) -> None:
    for place in (0, 7_000, 151_935):
        logits = normal(151_936, dtype)
        logits[place] = bad
        for sampling in (None, *SAMPLINGS[:2], Sampling(0, repetition_penalty=2)):
            assert Call(logits, [0.5, 0.5], sampling).run() == [-1, -1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_likeliest(dtype: str) -> None:
    """The first of equal logits is taken, and 0 equals -0."""
    for vocabulary in (151_936, 257, 1):
        for seed in range(3):
            logits = normal(vocabulary, dtype, seed=seed)
            assert Call(logits, [0.5] * 3).run() == [int(logits.float().numpy().argmax())] * 3
    logits = torch.full((70_000,), -0.0, dtype=DTYPES[dtype][1])
    logits[60_000:] = 0
    assert Call(logits, [0.5]).run() == [0]
    logits[7:9] = torch.finfo(DTYPES[dtype][1]).max
    assert Call(logits, [0.5]).run() == [7]
    assert Call(logits, [0.3, 0.6], Sampling(1.0, 0)).run() == [7, 8]


@pytest.mark.parametrize("answer", [0, 4])
@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": 1.3}, {"repetition_penalty": 0.7}, {"presence_penalty": 0.5},
        {"frequency_penalty": -0.25}, {"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 3},
        {"no_repeat_ngram_size": 10}, {"logit_bias": {3: 5.5, 9: -np.inf, 12: 1e30}},
        {"repetition_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": 0.5, "no_repeat_ngram_size": 2,
         "logit_bias": {5: 2.0, 3: -1.0}},
    ],
    ids=str,
)  # fmt: skip
def test_penalties(change: dict[str, Any], answer: int) -> None:
    for vocabulary in (20, 40_000):
        for sampling in (Sampling(0.9, 0, **change), Sampling(0.9, 30, 0.9, **change)):
            check(normal(vocabulary, "f16"), sampling, answer=answer)
        likeliest = changed(normal(vocabulary, "f16"), Sampling(0, **change), TEXT, answer).argmax()
        assert Call(normal(vocabulary, "f16"), [0.5], Sampling(0, **change), answer=answer).run() == [likeliest]


def test_what_the_next_run_reads() -> None:
    """Tokens, places and masks of rows of several lengths, one of which has ended; and what penalties keep."""
    sampling = Sampling(0, repetition_penalty=1.5, no_repeat_ngram_size=4)
    call = Call(normal(500, "f32"), [0.5] * 3, sampling, past=[9, -1, 4], mask=12, before=8)
    first, ended, last = call.run()
    held = {name: tensor.cpu().numpy() for name, tensor in call.held.items()}
    assert ended == -9
    assert held["ids"].tolist() == [first, -5, last]
    assert held["positions"].tolist() == [9, -5, 4]
    assert held["mask"].tolist() == [[1] * 10 + [0] * 2, [0] * 8 + [1] + [0] * 3, [1] * 4 + [0] * 5 + [1] + [0] * 2]
    before = np.zeros(500, int)
    before[TEXT] = 1
    for row, token in ((0, first), (2, last)):
        expected = before.copy()
        expected[token] = (expected[token] | 1) + 2
        assert held["counts"][row].tolist() == expected.tolist()
    assert (held["counts"][1] == before).all()
    assert (held["history"][0, 9], held["history"][2, 4]) == (first, last)


@pytest.mark.parametrize("sampling", [None, Sampling(0.7, 20, 0.8, seed=5), Sampling(1.1, 0, 0.9, seed=6)], ids=str)
def test_a_seed_gives_the_samplers_tokens(sampling: Sampling | None) -> None:
    """Through Choice, whose numbers are those of Sampler, over several tokens of two rows."""
    sample = [Sampler(sampling, TEXT) for _ in range(2)]
    made = _choice([TEXT, TEXT], 30, 3_000, sampling)
    for at in range(20):
        logits = torch.stack([normal(3_000, "f32", 1.5, seed=2 * at + row) for row in range(2)])
        made.start(_Logits(logits.cuda()), [len(TEXT) + at] * 2, None)
        assert made.take() == [one(row.numpy()) for one, row in zip(sample, logits, strict=True)]


def test_vocabularies_that_are_too_large() -> None:
    with pytest.raises(ValueError, match=r"a vocabulary of 4194305 tokens, expected 1 to 4194304"):
        Call(torch.zeros(4_194_305), [0.5]).run()


class _Logits:
    """A Buffer of torch's memory."""

    def __init__(self, tensor: Any):
        torch.cuda.synchronize()
        self.tensor = tensor
        self.address, self.bytes = tensor.data_ptr, lambda: tensor.numel() * 4
        self.row_bytes = lambda: tensor.shape[-1] * 4


def _choice(texts: list[list[int]], longest: int, vocabulary: int, sampling: Sampling | None) -> device_sampling.Choice:
    """A Choice whose memory is torch's, as the tests' ONNX Runtime has no GPU."""

    class Held:
        def __init__(self, tensor: Any):
            self.tensor, self.address = tensor, tensor.data_ptr

        of = classmethod(lambda cls, array, _: cls(torch.from_numpy(array).cuda()))
        empty = classmethod(lambda cls, shape, dtype, _: cls(torch.empty(shape, dtype=torch.uint8, device="cuda")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_sampling, "Buffer", Held)
        return device_sampling.Choice(texts, longest, vocabulary, dtype=np.dtype(np.float32), sampling=sampling)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [100, 4096, 151_936])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(0), Sampling(1.0, 0), Sampling(0.7, 20, 0.8), Sampling(1.0, 0, 0.95, repetition_penalty=1.3)],
)
def test_tokens_that_may_come(dtype: str, vocabulary: int, sampling: Sampling) -> None:
    """Tokens without their bit never come, as if their logits were the least, for few tokens and for many."""
    rng, logits = np.random.default_rng(vocabulary), normal(vocabulary, dtype)
    numbers = [0.0, 0.3, 0.7, 1 - 2.0**-53]
    for share in (3 / vocabulary, 0.5, 1.0):
        allowed = rng.random(vocabulary) < share
        allowed[rng.integers(vocabulary)] = True
        least = torch.tensor(torch.finfo(logits.dtype).min, dtype=logits.dtype)
        expected = Call(torch.where(torch.from_numpy(allowed), logits, least), numbers, sampling).run()
        assert all(allowed[expected])
        assert Call(logits, numbers, sampling, allowed=np.tile(allowed, (4, 1))).run() == expected
    rows = np.zeros((2, vocabulary), bool)
    rows[[0, 1], [5, 7]] = True
    assert Call(logits, [0.5, 0.5], sampling, allowed=rows).run() == [5, 7]
    assert Call(logits, [0.5, 0.5], sampling, allowed=np.zeros((2, vocabulary), bool)).run() == [-2, -2]
