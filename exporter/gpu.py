"""Facts of CUDA's driver about this machine's GPUs: whether there is one, its free memory and its bandwidth.

The driver's library has had these functions since CUDA 11, whatever CUDA version ONNX Runtime brings along.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

#: the driver's library
DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
#: CUdevice_attribute: kHz of the memory's clock, and bits of its bus
_CLOCK, _BUS = 36, 37


def devices() -> int:
    """Count the GPUs that this process may use: 0 without a driver, or where CUDA_VISIBLE_DEVICES names none."""
    driver = _driver()
    count = ctypes.c_int()
    return 0 if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def free_memory() -> int | None:
    """Return the bytes that are free on the first GPU; None where nothing says so."""
    driver, device, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    if driver is None or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    free, total, before = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()
    try:
        if driver.cuCtxPushCurrent_v2(context):
            return None
        failed = driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        driver.cuCtxPopCurrent_v2(ctypes.byref(before))
        return None if failed else free.value
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)


def bandwidth() -> float | None:
    """Return the bytes a second of the first GPU's memory, from its clock and its bus; None where nothing says so."""
    driver, device, clock, bus = _driver(), ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver is None or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    for value, attribute in ((clock, _CLOCK), (bus, _BUS)):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return None
    return 2e3 * clock.value * bus.value / 8 or None  # two transfers a clock


def _driver() -> Any:
    """Return the driver's library, ready; None where there is none."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None
    return None if driver.cuInit(0) else driver
