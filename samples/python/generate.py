"""Greedy decoding of an exported folder: generate.py [--cuda] FOLDER COUNT ID... prints COUNT token ids."""

import sys

import numpy as np
import onnxruntime as ort

import quantmoe

TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}

cuda = sys.argv[1:2] == ["--cuda"]
del sys.argv[1 : 1 + cuda]
if len(sys.argv) < 4:
    sys.exit("usage: generate.py [--cuda] FOLDER COUNT ID...")
folder, count, ids = sys.argv[1], int(sys.argv[2]), [int(i) for i in sys.argv[3:]]
options = ort.SessionOptions()
options.register_custom_ops_library(quantmoe.ort_cuda_library_path() if cuda else quantmoe.ort_library_path())
provider = "CUDAExecutionProvider" if cuda else "CPUExecutionProvider"
session = ort.InferenceSession(f"{folder}/model.onnx", options, providers=[provider])

# Batch 1, no past: every dynamic dimension of a cache input after the first is the past length.
feed = {
    i.name: np.zeros([d if isinstance(d, int) else int(n == 0) for n, d in enumerate(i.shape)], TYPES[i.type])
    for i in session.get_inputs()
    if i.name.startswith("past_key_values")
}
names = ["logits", *(name.replace("past_key_values", "present") for name in feed)]
other = {i.name for i in session.get_inputs()} - feed.keys()
past, generated = 0, []
while len(generated) < count:
    step = {
        "input_ids": np.array([ids]),
        "position_ids": np.arange(past, past + len(ids))[None],
        "attention_mask": np.ones((1, past + len(ids)), np.int64),
    }
    logits, *cache = session.run(names, feed | {name: step[name] for name in other})
    feed = dict(zip(feed, cache, strict=True))
    past += len(ids)
    ids = [int(logits[0, -1].argmax())]
    generated += ids
print(*generated)
