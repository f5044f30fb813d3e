"""How tests build and run programs in other languages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import onnxruntime

ROOT = Path(__file__).resolve().parents[3]
RUNTIME = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"))
#: cargo's environment: one folder of compiled crates, small, and Python's ONNX Runtime
CARGO = {
    "CARGO_TARGET_DIR": f"{ROOT}/build/rust",
    "CARGO_PROFILE_DEV_DEBUG": "0",
    "ORT_DYLIB_PATH": str(RUNTIME),
}


def run(*command: str | Path, **environment: str) -> str:
    """Return what a program prints."""
    words, variables = [str(word) for word in command], os.environ | environment
    done = subprocess.run(words, capture_output=True, text=True, encoding="utf-8", env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def quantmoe(*arguments: str | Path) -> str:
    return run(Path(sys.executable).with_name("quantmoe"), *arguments)


def onnxruntime_headers() -> str:
    """Return the folder of the headers that the library was built with."""
    (cache,) = ROOT.glob("build/py3-*/CMakeCache.txt")
    headers = re.search("^ORT_INCLUDE_DIR:[^=]*=(.*)$", cache.read_text(encoding="utf-8"), re.MULTILINE)
    assert headers
    return headers[1]


def cmake(source: Path, build: Path, *options: str) -> None:
    """Build a C++ project that has packages/cpp."""
    folders = [f"-DORT_INCLUDE_DIR={onnxruntime_headers()}", f"-DORT_LIBRARY_DIR={RUNTIME.parent}"]
    text = f"-DQUANTMOE_TEXT_LIBRARY={ROOT}/build/rust/release/libquantmoe_text.so"
    run("cmake", "-S", source, "-B", build, text, *folders, *options)
    run("cmake", "--build", build)
