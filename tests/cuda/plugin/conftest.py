"""The plug-in as TensorRT opens it. Fixtures import what they need, which skips where no driver was built."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def driver():
    from support.cuda.trt import Driver

    return Driver()


@pytest.fixture
def plugin(driver):
    from support.cuda.plugin_layers import SPEC
    from support.cuda.trt import attributes_of

    made = driver.create(attributes_of(SPEC))
    assert made is not None, driver.log()
    return made


@pytest.fixture
def others(driver):
    """The driver, for a test that selects another operator."""
    yield driver
    driver.select("QuantMoE")


@pytest.fixture
def fake(driver):
    """The plug-in with an H200 that is not there."""
    from support.cuda.trt import Driver

    made = Driver(fake=True)
    made.lib.driver_device(90, 132, 233472)
    made.lib.driver_order(1, 0)
    yield made
    Driver()  # what the other tests call
