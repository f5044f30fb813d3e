"""The library for ONNX Runtime, and what runs on it: ``runtime``, ``serving`` and ``benchmarks`` of quantmoe."""

import ctypes
import json
import re
from pathlib import Path
from typing import Any

from quantmoe.custom_ops import library_file, native_name
from quantmoe.custom_ops.c_calls import Description

#: the ONNX Runtime whose API the libraries are written to, and every operator of exported models is in
OLDEST = (1, 21)
#: the one whose com.microsoft::QMoE can be told that weights lie as its schema says (weights_prepacked)
OLDEST_QMOE = (1, 28)
#: the one whose QMoE has accuracy_level
OLDEST_ACCURACY = (1, 31)
#: the one that reads opset 27
OLDEST_OPSET_27 = (1, 32)
#: the file name of a target's library
LIBRARIES = {"cpu": native_name("quantmoe_ort"), "cuda": native_name("quantmoe_ort_cuda")}
#: the one whose plug-in interface the execution provider is written to
OLDEST_PROVIDER = (1, 24)
#: the name of the execution provider
PROVIDER = "QuantMoE"
#: newest glibc whose symbols the library that `make build` and `make wheel` make may ask for
OLDEST_GLIBC = (2, 28)


def library_path() -> str:
    """Return the path of ``libquantmoe_ort.so``, for ``SessionOptions.register_custom_ops_library``.

    QUANTMOE_ORT_LIBRARY names another build of it. On Windows the file is ``quantmoe_ort.dll``.

    Raises:
        FileNotFoundError: it is not there.
    """
    return library_file(__name__, LIBRARIES["cpu"], "QUANTMOE_ORT_LIBRARY")


def cuda_library_path() -> str:
    """Return the path of ``libquantmoe_ort_cuda.so``, the operators for the CUDA execution provider.

    QUANTMOE_ORT_CUDA_LIBRARY names another build of it.

    Raises:
        FileNotFoundError: the package quantmoe-cuda is not installed.
    """
    return library_file(__name__, LIBRARIES["cuda"], "QUANTMOE_ORT_CUDA_LIBRARY")


def experts_report(library: str) -> list[dict[str, int]]:
    """Return counters of expert offloading, a dict for each session of this process.

    In C, each library exports ``size_t qm_experts_report(char* text, size_t size)``: one line of JSON for each session,
    or for each folder and GPU.

    - ``layers``, ``slots``, ``hits``, ``misses``: their number. A hit is an expert that had a slot.
    - CPU: ``slot_bytes`` of a slot, ``bytes_read`` from the file, ``rounds`` of experts in layers.
    - GPU: ``missed_bytes`` of all misses, and ``bytes_read`` from the file. Misses were copied for one call
      (``staged``), read through the bus (``not_copied``) or multiplied by the CPU (``computed``).

    Args:
        library: path of the loaded library.
    """
    text = ctypes.create_string_buffer(1 << 16)
    ctypes.CDLL(library).qm_experts_report(text, ctypes.c_size_t(len(text)))
    return [json.loads(line) for line in text.value.splitlines()]


def provider_devices() -> list[Any]:
    """Return the devices of the execution provider for ``com.microsoft``'s QMoE and MatMulNBits.

    They are for ``SessionOptions.add_provider_for_devices`` (guides/qmoe-models). The library is registered with ONNX
    Runtime unless it is already.

    Returns:
        onnxruntime.OrtEpDevice, one.

    Raises:
        ImportError: onnxruntime is not installed, or is older than 1.24.
        FileNotFoundError: the library is not there.
    """
    import onnxruntime  # not needed to export

    found = onnxruntime.__version__
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < OLDEST_PROVIDER:
        raise ImportError(
            f"the execution provider needs onnxruntime {'.'.join(map(str, OLDEST_PROVIDER))}, found {found}"
        )

    def devices() -> list[Any]:
        return [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]

    if not devices():
        onnxruntime.register_execution_provider_library(PROVIDER, library_path())
    return devices()


def build_info() -> str:
    """Return the compiler of ``libquantmoe_ort.so`` and this machine's kernel: "clang 22.1.8, panel_avx2".

    Raises:
        OSError: the library cannot be loaded.
    """
    found = Description.of(ctypes.CDLL(library_path()))
    return f"{found.compiler.decode()}, {found.kernel.decode() if found.kernel else found.refusal}"


def glibc_of(library: str | Path) -> tuple[int, int]:
    """Return the glibc that a library needs: the newest symbol version in its dynamic string table.

    (0, 0) means that it needs none, as on Windows.
    """
    names = re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", Path(library).read_bytes())
    return max(((int(major), int(minor)) for major, minor in names), default=(0, 0))
