"""Greedy decoding by onnxruntime-genai: generate.py FOLDER COUNT ID... prints up to COUNT token ids."""

import contextlib
import json
import os
import sys
from pathlib import Path

import onnxruntime_genai as og


def open_model(folder):
    """Load the model with the installed package's library; the folder's is native code of whoever exported it."""
    found = json.loads(Path(folder, "genai_config.json").read_text(encoding="utf-8"))
    name = found["model"]["decoder"]["session_options"].get("custom_ops_library", "")
    config = og.Config(os.path.abspath(folder))
    try:
        import quantmoe
    except ImportError:
        return og.Model(config)
    library = os.path.realpath(quantmoe.ort_cuda_library_path() if "cuda" in name else quantmoe.ort_library_path())
    options = {"custom_ops_library": library}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    with contextlib.chdir(os.path.dirname(library)):  # else onnxruntime-genai takes none but the model's folder's
        return og.Model(config)


def generate(folder, count, ids):
    context = json.loads(Path(folder, "genai_config.json").read_text(encoding="utf-8"))["model"]["context_length"]
    if len(ids) >= context:
        raise ValueError(
            f"{len(ids)} tokens and 1 for the answer do not fit into the model's context of {context} tokens"
        )
    model = open_model(folder)
    params = og.GeneratorParams(model)
    params.set_search_options(do_sample=False, max_length=min(len(ids) + count, context))
    generator = og.Generator(model, params)
    generator.append_tokens(ids)
    while not generator.is_done():
        generator.generate_next_token()
    return generator.get_sequence(0)[len(ids) :]


def number(text):
    if not text.isdecimal() or len(text) > 18:
        raise ValueError(f'"{text}": expected a number from 0')
    return int(text)


if __name__ == "__main__":
    try:
        if len(sys.argv) < 4:
            raise ValueError("usage: generate.py FOLDER COUNT ID...")
        count, *ids = map(number, sys.argv[2:])
        print(*generate(sys.argv[1], count, ids))
    except Exception as error:  # onnxruntime-genai's exceptions have no base class of their own
        sys.exit(str(error))
