"""Greedy decoding of an exported folder: generate.py [--cuda] FOLDER COUNT ID... prints up to COUNT token ids."""

import sys

import numpy as np
import onnxruntime as ort

# the last two are caches of codes, int8 and fp8
TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8}


def library_of(folder):
    """The installed package's, else the folder's, which is native code of whoever exported it."""
    try:
        import quantmoe
    except ImportError:
        return f"{folder}/libquantmoe_ort.so"
    return quantmoe.ort_library_path()


def create_session(folder, cuda):
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what it logs is in its exceptions
    if cuda:
        import quantmoe

        library, provider = quantmoe.ort_cuda_library_path(), "CUDAExecutionProvider"
    else:
        library, provider = library_of(folder), "CPUExecutionProvider"
    options.register_custom_ops_library(library)
    return ort.InferenceSession(f"{folder}/model.onnx", options, providers=[provider])


def generate(session, count, ids, device):
    metadata = session.get_modelmeta().custom_metadata_map
    stop = metadata.get("eos_token_id", "").split(",")
    context = int(metadata.get("context_length", sys.maxsize))
    if len(ids) >= context:
        raise ValueError(
            f"{len(ids)} tokens and 1 for the answer do not fit into the model's context of {context} tokens"
        )
    count = min(count, context - len(ids))

    # Batch 1; every dynamic dimension of a cache input after the first is its length. Past and present are one buffer
    # that each run writes in place, if the model takes that. Otherwise present is the longer past of the next run.
    shares = metadata.get("past_present_share_buffer") == "true"
    length = len(ids) + count if shares else 0
    cache = {}
    for i in session.get_inputs():
        if i.name.startswith("past_key_values"):
            shape = [1] + [d if isinstance(d, int) else length for d in i.shape[1:]]
            cache[i.name] = ort.OrtValue.ortvalue_from_shape_and_type(shape, TYPES[i.type], device)
    binding, past, generated = session.io_binding(), 0, []
    for _ in range(count):
        total = past + len(ids)
        binding.bind_cpu_input("input_ids", np.array([ids]))
        binding.bind_cpu_input("attention_mask", np.ones((1, total), np.int64))
        binding.bind_cpu_input("position_ids", np.arange(past, total)[None])
        binding.bind_output("logits")
        for name, value in cache.items():
            binding.bind_ortvalue_input(name, value)
            present = name.replace("past_key_values", "present")
            if shares:
                binding.bind_ortvalue_output(present, value)
            else:
                binding.bind_output(present, device)
        session.run_with_iobinding(binding)
        logits, *present = binding.get_outputs()
        cache, past = dict(zip(cache, present, strict=True)), total
        logits = logits.numpy()[0, -1]
        if not np.isfinite(logits).all():
            raise ValueError("logits are not finite")
        ids = [int(logits.argmax())]
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
    print(*generate(create_session(folder, cuda), count, ids, "cuda" if cuda else "cpu"))
except Exception as error:  # ONNX Runtime's exceptions have no base class of their own
    sys.exit(str(error))
