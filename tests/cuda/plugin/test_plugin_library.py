"""The TensorRT plug-in library: its symbols, and how versions of TensorRT load and register it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.cuda.plugin_layers import OPERATORS
from support.cuda.trt import FIELD_TYPES

import quantmoe
from quantmoe.custom_ops.op import attribute_kinds
from quantmoe.custom_ops.op_def.schema import schema


@pytest.mark.parametrize("op", list(schema().operators))
def test_creator(others, op):
    others.select(op)
    assert [others.lib.driver_name(others.creator, i) for i in range(3)] == [op.encode(), b"1", b""]
    found = {f.name.decode(): f.type for f in others.fields("field_names", others.creator)}
    kinds = {n: FIELD_TYPES[k if k in ("i", "f") else "s"] for n, k in attribute_kinds(op).items()}
    if op == "QuantMoE":  # what TensorRT's parser is to pass where a node has it
        kinds |= dict.fromkeys(schema().operators[op].optional, FIELD_TYPES["s"])
    assert found == kinds
    assert next(iter(found)) == "op_version"


def test_exported_symbols_and_libraries():
    path = quantmoe.trt_library_path()
    listing = subprocess.check_output(["nm", "-D", "--defined-only", path], text=True)
    assert {line.split()[-1] for line in listing.splitlines()} == {
        "getCreators",
        "setLoggerFinder",
        "qm_experts_report",
    }
    needed = subprocess.check_output(["readelf", "-d", path], text=True)
    assert "nvinfer" not in needed
    assert "libcuda" not in needed


@pytest.mark.parametrize(
    ("version", "plain"),
    [(100600, True), (101600, True), (110000, False), (110400, False), (10400, True), (10500, False), (10701, False)],
)
def test_loggers_of_all_versions(version, plain):
    """TensorRT 10 and TensorRT-RTX before 1.5 have other tables of virtual functions; each in its own process."""
    code = f"d = Driver({version}, {plain})\nassert d.create({{}}) is None\nprint(d.log(), end='')"
    assert run(code) == '1 QuantMoE layer "experts": attribute op_version is required\n'


def run(code: str) -> str:
    """What a process of its own prints."""
    head = "import ctypes, quantmoe\nfrom support.cuda.trt import *\n"
    done = subprocess.run(
        [sys.executable, "-c", head + code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


#: a TensorRT's version, whether its tables are those of 10
VERSIONS = [(100600, True), (110400, False), (10400, True), (10701, False)]
IN_REGISTRY = """
lib = driver_library()
lib.driver_registry({version}, {plain})
path = quantmoe.trt_library_path().encode()
def log():
    text = lib.driver_log().decode()
    lib.driver_clear()
    return text
"""


@pytest.mark.parametrize(("version", "plain"), VERSIONS)
def test_opening_the_library_registers_the_creators(version, plain):
    """trtexec --staticPlugins and ONNX Runtime's trt_extra_plugin_lib_paths call nothing of a library."""
    code = (
        IN_REGISTRY
        + "ctypes.CDLL(path.decode())\nprint(lib.driver_registered())\nlib.driver_log_something()\nprint(log())"
    )
    out = run(code.format(version=version, plain=plain)).splitlines()
    assert out[:2] == [f"{OPERATORS}", '1 QuantMoE layer "experts": attribute op_version is required']


@pytest.mark.parametrize(("version", "plain"), VERSIONS)
@pytest.mark.parametrize("opened_before", [False, True])
def test_a_registry_can_load_the_library(version, plain, opened_before):
    """--dynamicPlugins; the library's own registration must not be in its way, nor complain."""
    code = IN_REGISTRY + opened_before * "ctypes.CDLL(path.decode())\n"
    code += "library = lib.driver_load(path)\nprint(bool(library), lib.driver_registered(), repr(log()))\n"
    code += "lib.driver_unload(ctypes.c_void_p(library))\nprint(lib.driver_registered())\n"
    code += "print(bool(lib.driver_load(path)), lib.driver_registered(), repr(log()))"
    out = run(code.format(version=version, plain=plain)).splitlines()
    assert out == [f"True {OPERATORS} ''", "0", f"True {OPERATORS} ''"]


def test_a_registry_that_loads_the_library_takes_it_from_no_other(tmp_path):
    """A process may have TensorRT and TensorRT-RTX; one driver plays each."""
    copy = tmp_path / "driver.so"
    shutil.copy(os.environ["QUANTMOE_TRT_DRIVER"], copy)
    code = f"other = ctypes.CDLL({str(copy)!r})\n" + IN_REGISTRY + "other.driver_registry(10701, 0)\n"
    code += "ctypes.CDLL(path.decode())\nprint(lib.driver_registered(), other.driver_registered())\n"
    code += "lib.driver_load.restype = ctypes.c_void_p\nlibrary = lib.driver_load(path)\n"
    code += "print(bool(library), lib.driver_registered(), other.driver_registered(), repr(log()))\n"
    code += "lib.driver_unload(ctypes.c_void_p(library))\nprint(lib.driver_registered(), other.driver_registered())"
    out = run(code.format(version=100600, plain=True)).splitlines()
    assert out == [f"{OPERATORS} {OPERATORS}", f"True {OPERATORS} {OPERATORS} ''", f"0 {OPERATORS}"]


def test_a_second_copy_of_the_library_is_not_registered(tmp_path):
    """An engine may hold one (trtexec --setPluginsToSerialize), which TensorRT writes to a file and loads."""
    copy = tmp_path / "copy.so"
    shutil.copy(quantmoe.trt_library_path(), copy)
    code = IN_REGISTRY + f"ctypes.CDLL(path.decode())\nctypes.CDLL({str(copy)!r})\n"
    code += "print(lib.driver_registered(), repr(log()))"
    assert run(code.format(version=100600, plain=True)) == f"{OPERATORS} ''\n"


def test_without_a_known_tensorrt_messages_go_to_stderr():
    code = "from support.cuda.trt import Driver\nd = Driver(0)\nassert d.create({}) is None\nassert not d.log()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stderr == 'QuantMoE layer "experts": attribute op_version is required\n'
