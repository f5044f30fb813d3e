"""The library as ONNX Runtime opens it. Fixtures import what they need, which skips where no driver was built."""

from __future__ import annotations

import ctypes

import pytest


@pytest.fixture(scope="module")
def driver():
    from support.cuda.ort import Driver

    return Driver()


@pytest.fixture(scope="module")
def layer():
    from support.cuda.layers import BASE, build

    return build(BASE)


@pytest.fixture
def fake(driver):
    """Opens the adapter whose GPU is the test's, with session entries."""
    from support.cuda.ort import FAKE

    ctypes.CDLL(FAKE).driver_device(90, 132, 233472)
    driver.lib.driver_scratch_on_device(0)
    yield lambda **entries: driver.open(21, FAKE, entries)
    driver.lib.driver_scratch_on_device(1)
    driver.open(21)
