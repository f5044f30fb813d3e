"""CONTRIBUTING.md's example of a CUDA format compiles: nvcc its kernels, a C++ compiler its facts. Needs no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from quantmoe.custom_ops.op_def.schema import read

ROOT = Path(__file__).parents[3]
NVCC = Path(sysconfig.get_path("purelib"), "nvidia/cu13/bin/nvcc")
INCLUDE = [f"-I{ROOT / folder}" for folder in ("custom_ops/include", "custom_ops/src", "custom_ops")]
#: what op.def's row would make
CODE = '#include "core/attributes.h"\nnamespace quantmoe { constexpr int32_t k_format_acme4 = 99; }\n'
KERNELS = """
#include "cuda/linear/select_linear.cuh"
#include "cuda/gemm/select_mma.cuh"
#include "cuda/gemm/select_wgmma.cuh"
namespace quantmoe {
template __global__ void moe_gemm_mma<__half, Acme4, 2, 1, false, false>(const __grid_constant__ GemmParams);
template __global__ void moe_down_decode<__nv_bfloat16, Acme4, 2>(const __grid_constant__ GemmParams);
template __global__ void moe_gemm_wgmma<__half, Acme4, Product::kDown, 24>(const __grid_constant__ GemmParams);
template __global__ void linear_wgmma<__nv_bfloat16, Acme4, 64>(const __grid_constant__ LinearParams);
}  // namespace quantmoe
"""
FACTS = "static_assert(quantmoe::Acme4Facts::kBits == 4 && quantmoe::Acme4Facts::group_size(0) == 32);\n"


@pytest.fixture
def example(tmp_path) -> Path:
    shutil.copy(ROOT / "tests/examples/acme4.cuh", tmp_path)
    (tmp_path / "op.def").write_text(read(ROOT / "custom_ops"), encoding="utf-8")
    return tmp_path


def compile(compiler: str | Path, source: Path, *options: str) -> None:
    found = subprocess.run(
        [compiler, *options, f"-I{source.parent}", *INCLUDE, source], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.skipif(not NVCC.exists(), reason="no nvcc (pyproject.toml's group cuda)")
def test_its_kernels_compile(example):
    source = example / "acme4.cu"
    source.write_text(CODE + '#include "acme4.cuh"\n' + KERNELS, encoding="utf-8")
    compile(NVCC, source, "-std=c++17", "-O1", "-ptx", "-arch=compute_90a", "-o", str(example / "acme4.ptx"))
    ptx = (example / "acme4.ptx").read_text(encoding="utf-8")
    assert ptx.count(".entry") == 4
    assert all(re.search(rf"\.entry \w*{kernel}\w*Acme4", ptx) for kernel in ("moe_gemm_mma", "moe_down_decode"))


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_its_facts_need_no_cuda(example):
    source = example / "acme4.cc"
    source.write_text(CODE + '#include "acme4.cuh"\n' + FACTS, encoding="utf-8")
    compile("c++", source, "-std=c++20", "-Wall", "-Werror", "-fsyntax-only")
