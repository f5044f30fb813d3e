"""A model of another tool in QuantMoE's execution provider: provider.py MODEL prints the first numbers of each output.

The inputs are 1 everywhere, and so is the size of each free dimension; nothing is past.
"""

import os
import sys

import numpy as np
import onnxruntime as ort

from quantmoe.ort_ext import library_path

TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


def create_session(model):
    ort.register_execution_provider_library("QuantMoE", library_path())  # once in a process
    devices = [device for device in ort.get_ep_devices() if device.ep_name == "QuantMoE"]
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what it logs is in its exceptions
    options.add_provider_for_devices(devices, {"activations": "auto"})  # docs/guides/qmoe-models.md has the options
    return ort.InferenceSession(model, options)


def size(dimension):
    if isinstance(dimension, int):
        return dimension
    return 0 if dimension and "past" in dimension and "+" not in dimension else 1


def ones(value):
    if value.type not in TYPES:
        raise ValueError(f"input {value.name} is {value.type}, expected one of {', '.join(TYPES)}")
    return np.ones([size(dimension) for dimension in value.shape], TYPES[value.type])


try:
    if len(sys.argv) != 2:
        raise ValueError("usage: provider.py MODEL")
    if os.path.isdir(sys.argv[1]):
        raise ValueError(f"{sys.argv[1]} is a folder, expected a model's .onnx file")
    session = create_session(sys.argv[1])
    outputs = session.run(None, {value.name: ones(value) for value in session.get_inputs()})
    for value, found in zip(session.get_outputs(), outputs, strict=True):
        print(f"{value.name}:", *(f"{number:.6f}" for number in found.reshape(-1)[:8]))
except Exception as error:  # ONNX Runtime's exceptions have no base class of their own
    sys.exit(str(error))
