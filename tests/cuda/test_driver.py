"""The kernels over the driver alone (custom_ops/src/driver), as on Windows; skipped where no GPU is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.cuda.built import gpu

LIBRARY = os.environ.get("QUANTMOE_CUDA_DRIVER_LIBRARY", "")
#: tests of each group of kernels: with tensor maps, clusters, host memory and graphs
TESTS = (
    *("moe/test_cuda_linears.py::test_linear", "moe/test_cuda_layers.py", "attention/test_attention.py"),
    *("moe/test_router_kernels.py", "test_linear_attention.py", "moe/test_expert_cache.py"),
)


@gpu
@pytest.mark.skipif(not LIBRARY, reason="QUANTMOE_CUDA_DRIVER_LIBRARY names no library")
@pytest.mark.parametrize("tests", TESTS)
def test_without_the_runtime(tests: str) -> None:
    """The kernels' own tests pass with the library that has no runtime of NVIDIA."""
    assert b"cuLaunchKernelEx" in Path(LIBRARY).read_bytes()
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", Path(__file__).parent / tests]
    run = subprocess.run(
        pytest_, env=os.environ | {"QUANTMOE_CUDA_LIBRARY": LIBRARY}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    assert " passed" in run.stdout
