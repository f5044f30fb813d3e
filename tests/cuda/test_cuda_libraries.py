"""What the CUDA libraries ask of the system that loads them; their symbols are those of the tests beside this one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.harness.elf import check_segments

import quantmoe
from quantmoe.custom_ops import cuda

#: bytes that each thread holds for CUDA's runtime, which is linked into the libraries
RUNTIME = 4096


def cuda_library_path() -> str:
    return cuda.library()._name


@pytest.mark.parametrize("path", [cuda_library_path, quantmoe.ort_cuda_library_path, quantmoe.trt_library_path])
def test_segments(path: Callable[[], str]) -> None:
    try:
        library = path()
    except FileNotFoundError:
        pytest.skip("no CUDA library was built (QUANTMOE_CUDA)")
    check_segments(Path(library).read_bytes(), RUNTIME + 64)


def test_only_the_c_abi_is_exported() -> None:
    try:
        library = cuda_library_path()
    except FileNotFoundError:
        pytest.skip("no CUDA library was built (QUANTMOE_CUDA)")
    listing = subprocess.check_output(["nm", "-D", "--defined-only", library], text=True)
    assert all(line.split()[-1].startswith("qm_") for line in listing.splitlines())
