"""A new operator: its .def, reference and kernels, in a copy of the tree in which no other file changes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEF = """// factor times the sum of the tokens so far, which is a state.
QM_OP(RunningSum, running_sum, 1)
QM_INPUT(RunningSum, x, T, "[B, S, channels]")
QM_INPUT(RunningSum, past_sum, float, "[B, channels]")
QM_OUTPUT(RunningSum, y, T, "[B, S, channels]")
QM_OUTPUT(RunningSum, present_sum, float, "past_sum")

QM_ATTR(RunningSum, i, op_version)
QM_ATTR(RunningSum, i, channels)
QM_ATTR(RunningSum, f, factor)
QM_CPU(RunningSum, running_sum)
QM_CUDA(RunningSum, running_sum)
QM_END(RunningSum, running_sum)

// `y = factor * sum`, in f32.
"""
REFERENCE = """import numpy as np


def running_sum(spec, x, past_sum):
    sums = past_sum[:, None] + np.cumsum(x.astype(np.float64), 1)
    return spec.factor * sums, sums[:, -1]
"""
KERNEL = """#include <algorithm>

#include "core/attributes.h"
#include "cpu/elementwise.h"
#include "cpu/operators.h"

namespace quantmoe {
namespace {

int check(const qm_running_sum& node, char* err) {
  QM_TRY(check_node("RunningSum", &node, err));
  return check_range("channels", node.channels, 1, 1 << 24, err);
}
size_t workspace(const qm_running_sum& node, const qm_call&) { return sizeof(float) * node.channels; }
int run(const qm_running_sum& node, const qm_call& call, char*) {
  const SequenceCall<qm_running_sum> made{call.inputs, call.outputs};
  float* const row = static_cast<float*>(call.workspace);
  const int64_t size = int64_t{node.channels} * (made.type == QM_F32 ? 4 : 2);
  for (int64_t b = 0; b < made.batch; ++b) {
    float* const sum = made.present_sum + b * node.channels;
    std::copy_n(made.past_sum + b * node.channels, node.channels, sum);
    for (int64_t t = b * made.tokens; t < (b + 1) * made.tokens; ++t) {
      to_float(made.type, static_cast<const uint8_t*>(made.x) + t * size, node.channels, row);
      for (int32_t i = 0; i < node.channels; ++i) row[i] = node.factor * (sum[i] += row[i]);
      from_float(made.type, row, node.channels, static_cast<uint8_t*>(made.y) + t * size);
    }
  }
  return QM_OK;
}

}  // namespace

const CpuOperator cpu_running_sum = kCpuOperator<qm_running_sum, check, workspace, run>;

}  // namespace quantmoe
"""
#: everything that a program does with it, in the copy
PROGRAM = """import json, sys
import numpy as np, onnx_ir as ir, onnxruntime as ort, torch
from quantmoe.custom_ops import torch_op
from quantmoe.custom_ops.op_def import nodes
from quantmoe.custom_ops.ops.running_sum import running_sum

spec = nodes.RunningSum(channels=5, factor=-1.5)
x, past = torch.randn(2, 3, 5), torch.randn(2, 5)
y, present = torch.ops.quantmoe.running_sum(x, past, json.dumps(spec.attributes()))
want = running_sum(spec, x.numpy(), past.numpy())
np.testing.assert_allclose(y.numpy(), want[0], rtol=1e-5, atol=1e-5)
np.testing.assert_allclose(present.numpy(), want[1], rtol=1e-5, atol=1e-5)


class Model(torch.nn.Module):
    def forward(self, x, past):
        return torch.ops.quantmoe.running_sum(x, past, json.dumps(spec.attributes()))


program = torch.onnx.export(Model(), (x, past), dynamo=True, custom_translation_table=torch_op.ONNX, verbose=False)
options = ort.SessionOptions()
options.register_custom_ops_library(sys.argv[1])
session = ort.InferenceSession(program.model_proto.SerializeToString(), options)
got = session.run(None, {given.name: value.numpy() for given, value in zip(session.get_inputs(), (x, past))})
for found, expected in zip(got, want, strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
assert [list(output.shape) for output in session.get_outputs()] == [[2, 3, 5], [2, 5]]
wrong = ir.from_proto(program.model_proto)
node = next(node for node in wrong.graph if node.op_type == "RunningSum")
node.attributes["channels"] = ir.AttrInt64("channels", 0)
try:
    ort.InferenceSession(ir.to_proto(wrong).SerializeToString(), options)
except Exception as error:
    assert "channels is 0, expected 1 to" in str(error), error
else:
    raise AssertionError("channels of 0 are not refused")
print("RunningSum runs")
"""


PLAN = """#include "core/attributes.h"
#include "cuda/common/operators.h"

namespace quantmoe {

int plan_running_sum(const void* node, const qm_cuda_call&, const qm_cuda_device&, qm_cuda_node_plan&, char* err) {
  return check_node("RunningSum", node, err);
}

}  // namespace quantmoe
"""
LAUNCH = """#include <cuda_fp16.h>

#include "cuda/common/launcher.h"
#include "cuda/common/operators.h"

namespace quantmoe {
namespace {

struct SumParams {
  int channels, tokens;
  float factor;
  const __half* x;
  const float* past;
  __half* y;
  float* present;
};
__global__ void add_tokens(SumParams p) {
  const int channel = threadIdx.x, row = blockIdx.x;
  float sum = p.past[row * p.channels + channel];
  for (int t = row * p.tokens; t < (row + 1) * p.tokens; ++t) {
    sum += __half2float(p.x[t * p.channels + channel]);
    p.y[t * p.channels + channel] = __float2half(p.factor * sum);
  }
  p.present[row * p.channels + channel] = sum;
}

}  // namespace

int launch_running_sum(const void* of, const qm_cuda_node_plan&, const qm_cuda_call& call, char* err) {
  const qm_running_sum& node = *static_cast<const qm_running_sum*>(of);
  const SequenceCall<qm_running_sum> made{call.inputs, call.outputs};
  const SumParams params{node.channels, static_cast<int>(made.tokens), node.factor, static_cast<const __half*>(made.x),
                         made.past_sum, static_cast<__half*>(made.y), made.present_sum};
  Launcher launcher{static_cast<cudaStream_t>(call.stream)};
  launcher.run(add_tokens, params, dim3(static_cast<unsigned>(made.batch)), node.channels, 0, false);
  return report(launcher.error, err);
}

}  // namespace quantmoe
"""
#: the operator's files in custom_ops; no other file of the tree changes
FILES = {
    "ops/running_sum.def": DEF,
    "ops/running_sum.py": REFERENCE,
    "src/cpu/running_sum.cc": KERNEL,
    "src/cuda/state/running_sum_plan.cc": PLAN,
    "src/cuda/state/running_sum.cu": LAUNCH,
}
#: sources that have op.def's tables, or say which operators there are; the other objects are those of `make build`
TABLES = ("core/attributes", "core/shapes", "cpu/operators", "cpu/running_sum", "common/operator", "cpu/adapter")


def cache_of(build: Path) -> dict[str, str]:
    """Return CMake's variables of a build folder."""
    lines = (build / "CMakeCache.txt").read_text(encoding="utf-8").splitlines()
    return {line.partition(":")[0]: line.partition("=")[2] for line in lines if re.match(r"\w+:\w+=", line)}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the sources with the operator's files, and links to the package's folders."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in ("custom_ops", "ort_ext", "trt_plugins", "packages/cpp"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "CMakeLists.txt", copy)
    for name, text in FILES.items():
        (copy / "custom_ops" / name).write_text(text, encoding="utf-8")
    package = copy / "python/quantmoe"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "custom_ops").symlink_to(copy / "custom_ops")
    return copy


def configure(tree: Path, *options: str, **environment: str) -> Path:
    build = tree / "build"
    command = ["cmake", "-S", tree, "-B", build, "-G", "Ninja", *options]
    subprocess.run(command, env=os.environ | environment, check=True, capture_output=True)
    return build


def test_onnx_runtime_and_torch_run_it(tree: Path) -> None:
    made = next((ROOT / "build").glob("py3-none-*/build.ninja"), None)
    if made is None:
        pytest.skip("no library of `make build`")
    known = cache_of(made.parent)
    compiler = known["CMAKE_CXX_COMPILER"] + known.get("CMAKE_CXX_COMPILER_ARG1", "")
    build = configure(tree, "-DCMAKE_BUILD_TYPE=None", f"-DORT_ROOT={known['ORT_INCLUDE_DIR']}", CXX=compiler)
    library = "ort_ext/libquantmoe_ort.so"
    listed = subprocess.check_output(["ninja", "-C", build, "-t", "commands", library], text=True)
    *compiled, linked = [line for line in listed.splitlines() if known["CMAKE_CXX_COMPILER"] in line]
    for command in compiled:
        words = shlex.split(command)
        name = words[words.index("-o") + 1]
        (build / name).parent.mkdir(parents=True, exist_ok=True)
        if any(part in name for part in TABLES):
            subprocess.run([*words, "-O1", "-fno-sanitize=undefined", "-w"], cwd=build, check=True)
        else:
            shutil.copy(made.parent / name, build / name)
    subprocess.run(linked, shell=True, cwd=build, check=True)
    environment = os.environ | {"PYTHONPATH": str(tree / "python")}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, build / library], env=environment, check=False, capture_output=True, text=True
    )
    assert "RunningSum runs" in found.stdout, found.stderr


def test_the_libraries_for_gpus_compile(tree: Path) -> None:
    """The plug-in and ONNX Runtime's CUDA library, without linking; nvcc the kernel."""
    if "QUANTMOE_TRT_DRIVER" not in os.environ:
        pytest.skip("no CUDA build (make test-cuda)")
    known = cache_of(Path(os.environ["QUANTMOE_TRT_DRIVER"]).parents[1])
    nvcc = Path(known["CMAKE_CUDA_COMPILER"])
    headers = [known["TENSORRT_INCLUDE_DIR"], known["ORT_INCLUDE_DIR"], nvcc.parents[1] / "include"]
    folders = [tree / folder for folder in ("custom_ops", "custom_ops/include", "custom_ops/src", "ort_ext/src")]
    (tree / "ops.def").write_text(
        "".join(f'#include "ops/{file.name}"\n' for file in (tree / "custom_ops/ops").glob("*.def")), encoding="utf-8"
    )
    include = [f"-I{folder}" for folder in (tree, *folders)]
    engines = [f"-isystem{folder}" for folder in headers]
    for source in (
        "trt_plugins/src/creator.cc",
        "trt_plugins/src/plain.cc",
        "ort_ext/src/cuda/adapter.cc",
        "custom_ops/src/cuda/common/operators_plan.cc",
        "custom_ops/src/cuda/state/running_sum_plan.cc",
    ):
        subprocess.run(["c++", "-std=c++20", "-fsyntax-only", *include, *engines, tree / source], check=True)
    for source in ("common/operators.cu", "state/running_sum.cu"):
        command = [nvcc, "-std=c++17", "-ptx", *include, tree / "custom_ops/src/cuda" / source, "-o", tree / "made.ptx"]
        subprocess.run(command, check=True)
    assert "add_tokens" in (tree / "made.ptx").read_text(encoding="utf-8")
