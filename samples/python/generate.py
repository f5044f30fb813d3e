"""Greedy decoding of an exported folder: generate.py [--cuda] FOLDER COUNT ID... prints up to COUNT token ids."""

import sys

import numpy as np
import onnxruntime as ort

TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def create_session(folder, cuda):
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what it logs is in its exceptions
    if cuda:
        import quantmoe

        library, provider = quantmoe.ort_cuda_library_path(), "CUDAExecutionProvider"
    else:
        library, provider = f"{folder}/libquantmoe_ort.so", "CPUExecutionProvider"
    options.register_custom_ops_library(library)
    return ort.InferenceSession(f"{folder}/model.onnx", options, providers=[provider])


def generate(session, count, ids):
    metadata = session.get_modelmeta().custom_metadata_map
    stop = metadata.get("eos_token_id", "").split(",")
    context = int(metadata.get("context_length", sys.maxsize))
    if len(ids) >= context:
        raise ValueError(f"a prompt of {len(ids)} tokens leaves no room in the model's context of {context}")

    # Batch 1, no past: every dynamic dimension of a cache input after the first is the past length.
    cache = {
        i.name: np.zeros([1] + [d if isinstance(d, int) else 0 for d in i.shape[1:]], TYPES[i.type])
        for i in session.get_inputs()
        if i.name.startswith("past_key_values")
    }
    names = ["logits", *(name.replace("past_key_values", "present") for name in cache)]
    past, generated = 0, []
    for _ in range(min(count, context - len(ids))):
        total = past + len(ids)
        feed = {
            "input_ids": np.array([ids]),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(past, total)[None],
        }
        logits, *present = session.run(names, feed | cache)
        cache, past = dict(zip(cache, present, strict=True)), total
        if not np.isfinite(logits[0, -1]).all():
            raise ValueError("logits are not finite")
        ids = [int(logits[0, -1].argmax())]
        generated += ids
        if str(ids[0]) in stop:
            break
    return generated


def number(text):
    if not text.isdecimal() or len(text) > 18:
        raise ValueError(f'"{text}": expected a number from 0')
    return int(text)


try:
    cuda = sys.argv[1:2] == ["--cuda"]
    arguments = sys.argv[1 + cuda :]
    if len(arguments) < 3:
        raise ValueError("usage: generate.py [--cuda] FOLDER COUNT ID...")
    folder, (count, *ids) = arguments[0], map(number, arguments[1:])
    print(*generate(create_session(folder, cuda), count, ids))
except Exception as error:  # ONNX Runtime's exceptions have no base class of their own
    sys.exit(str(error))
