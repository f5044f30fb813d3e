"""Every kernel with its buffers against inaccessible pages: one byte read or written too far is a fault.

Packed tensors, activations, ids, router weights, output and workspace, and the packer's input and output, lie once at
the end and once at the beginning of their pages. The kernels load vectors and prefetch ahead; sanitizers do not see
what inline assembly reads.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from support.harness.children import PYTHONPATH
from support.harness.sweeps import every
from support.operators import native_kernels as native
from support.operators.attention import SPECS, assert_bytes, ragged
from support.operators.cases import CASES, Case
from support.operators.panels import reference_row
from support.operators.specs import linear_spec

from quantmoe.custom_ops.layouts import cpu_panel

USABLE = [name for name, usable in native.kernels().items() if usable]
PAGE = mmap.PAGESIZE
ADVERSARIAL = [
    *CASES,
    *(
        Case(hidden=h, intermediate=i, weights=(kind, "bf16", False), group_size=g, activation_format=a, experts=3)
        for h, i in ((1, 1), (31, 33), (65, 129), (8, 250))
        for kind in ("int4", "int8")
        for g in (-1, 32, 128)
        for a in ("none", "int8_token_asym", "int8_group")
    ),
]


class Guarded:
    """Memory whose last byte is followed, or whose first is preceded, by a page that nobody may touch."""

    def __init__(self, at_end: bool) -> None:
        self.at_end, self.maps = at_end, []

    def __call__(self, size: int) -> np.ndarray:
        pages = -(-size // PAGE) * PAGE
        mapped = mmap.mmap(-1, pages + 2 * PAGE)
        self.maps.append(mapped)
        whole = np.frombuffer(mapped, np.uint8)
        for guard in (whole.ctypes.data, whole.ctypes.data + PAGE + pages):
            assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(guard), PAGE, 0) == 0  # PROT_NONE
        start = PAGE + (pages - size if self.at_end else 0)
        return whole[start : start + size]

    def copy(self, array: np.ndarray) -> np.ndarray:
        out = self(array.nbytes).view(array.dtype).reshape(array.shape)
        out[:] = array
        return out


def sweep(kernel: str) -> None:
    """Runs in a process of its own; prints what it is at, for the case that it dies there."""
    os.environ["QUANTMOE_FORCE_KERNEL"] = kernel
    # Scalar code is slow, and the sanitizers of `make test-sanitize` see all of it.
    many, cases = (19, ADVERSARIAL[::3]) if kernel == "panel_portable" else (101, ADVERSARIAL)
    for case in cases:
        layer = case.build()
        for at_end in (True, False):
            for tokens, dtype, id_type in (
                (1, np.float32, np.int64),
                (7, ml_dtypes.bfloat16, np.int32),
                (many, np.float16, np.int64),
            ):
                print(kernel, case, "end" if at_end else "beginning", tokens, flush=True)
                x, ids, weights = case.tokens(tokens)
                inputs = x.astype(dtype), ids.astype(id_type), weights
                want = layer.native()(*inputs)
                guarded = Guarded(at_end)
                moe = native.NativeMoE(layer.spec, guarded.copy(layer.w13), guarded.copy(layer.w2))
                for lanes in (1, 2):
                    got = moe(*map(guarded.copy, inputs), lanes=lanes, buffer=guarded)
                    assert got.tobytes() == want.tobytes()
    for name, spec in SPECS.items():
        for at_end, cache in ((True, np.float16), (False, np.float32), (True, "fp8_e4m3"), (False, "int8_token")):
            print(kernel, "attention", name, "end" if at_end else "beginning", flush=True)
            a, guarded = ragged(spec, cache=cache), Guarded(at_end)
            past = tuple(map(guarded.copy, a.past))
            names = ("qkv", "rows", "cos", "sin", "q_norm", "k_norm", "sinks")
            inside = dataclasses.replace(a, past=past, **{n: guarded.copy(getattr(a, n)) for n in names})
            inside = dataclasses.replace(inside, ups=tuple(map(guarded.copy, a.ups)))
            for lanes in (1, 20):
                assert_bytes(inside.run(lanes=lanes, buffer=guarded), a.run())
    guarded = Guarded(True)
    guarded(10)
    print("now past the end", flush=True)
    ctypes.memmove(guarded(64).ctypes.data + 64, b"x", 1)


@pytest.mark.parametrize("kernel", every(USABLE))
def test_kernel_stays_inside_its_buffers(kernel: str) -> None:
    """The child ends by touching a guard page itself, so that a guard that guards nothing fails the test."""
    code = f"from kernels.test_guard_pages import sweep; sweep({kernel!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": PYTHONPATH}
    )
    assert done.returncode != 0
    assert done.stdout.splitlines()[-1] == "now past the end", (done.stdout[-300:], done.stderr[-2000:])


@pytest.mark.parametrize("at_end", [True, False], ids=["end", "beginning"])
@pytest.mark.parametrize("case", ADVERSARIAL[:20:3] + ADVERSARIAL[-24:], ids=str)
def test_packer_stays_inside_its_buffers(case: Case, at_end: bool) -> None:
    rng = np.random.default_rng(0)
    for n, k in ((case.intermediate, case.hidden), (case.hidden, case.intermediate)):
        m = case.matrix(rng, n, k)
        guarded = Guarded(at_end)
        spec = linear_spec(k, n, cpu_panel.describe_down(m, case.activation_format)).moe
        arrays = ("codes", "scales", "zero_points", "bias", "pre_scale")
        guards = {name: guarded.copy(a) for name in arrays if (a := getattr(m, name)) is not None}
        out = guarded(cpu_panel.row_bytes(spec, "w2"))
        cpu_panel.pack_down(dataclasses.replace(m, **guards), spec, out)
        assert out.tobytes() == reference_row([m], spec.w2, packed_order=True).tobytes()
        cpu_panel.unpack_down(spec, out)
