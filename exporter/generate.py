"""Greedy generation with an exported model on ONNX Runtime (no torch)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.exporter.genai import eos_tokens
from quantmoe.exporter.inspect import ModelError, load, model_path
from quantmoe.exporter.memory import doing
from quantmoe.ort_ext import library_path

#: ONNX Runtime whose API ort_ext/adapter.h asks for
OLDEST = (1, 21)


@dataclass(frozen=True)
class Generated:
    """Greedy tokens and how long they took: ``prefill`` for the prompt, ``decode`` for every token after the first."""

    tokens: list[int]
    logits: np.ndarray
    """f32 [tokens, vocabulary]: what each token was chosen from."""
    prefill: float
    decode: float

    @property
    def tokens_per_second(self) -> float:
        return (len(self.tokens) - 1) / self.decode if self.decode else 0.0


class Generator:
    """An exported model in an ONNX Runtime session.

    Args:
        path: the model or its folder.
        threads: of the session; 0 is ONNX Runtime's choice.
        prefault: read all packed weights into memory now, not when a token first needs them.

    Raises:
        ModelError: the model or the session cannot be created, ONNX Runtime's words are in the message; it is too old.
    """

    def __init__(self, path: str | Path, threads: int = 0, prefault: bool = False):
        self.path, ort = model_path(path), runtime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # what it logs is in its exceptions
        if prefault:
            options.add_session_config_entry("quantmoe.prefault", "1")  # before the library is registered
        options.register_custom_ops_library(library_path())
        try:
            with doing(str(self.path)):
                self.session = ort.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])
        except MemoryError:
            raise
        except Exception as error:  # onnxruntime's exceptions have no public base class
            model = load(self.path)  # says which file is at fault
            target = model.metadata_props.get("target", "cpu")
            hint = f"exported with --target {target}, which this provider does not run: " if target != "cpu" else ""
            raise ModelError(f"{self.path}: {hint}{error}") from None
        context = self.session.get_modelmeta().custom_metadata_map.get("context_length", str(sys.maxsize))
        if not context.isdecimal():
            raise ModelError(f"{self.path}: context_length is {context!r}, expected a number of tokens")
        self.context = int(context)
        self.outputs = [output.name for output in self.session.get_outputs()]
        logits = [o.shape for o in self.session.get_outputs() if o.name == "logits"]
        past = {i.name: i for i in self.session.get_inputs() if i.name.startswith("past_key_values.")}
        floats = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        if (
            [len(shape) for shape in logits] != [3]
            or not past
            or not all(i.type in floats and len(i.shape) == 4 for i in past.values())
            or not all(name.replace("past_key_values", "present") in self.outputs for name in past)
        ):
            raise ModelError(
                f"{self.path}: expected the output logits [batch, sequence, vocabulary], the inputs past_key_values.* "
                f"[batch, heads, length, width] of {' or '.join(floats)}, and their outputs present.*"
            )
        self.last_only = logits[0][1] == 1
        self.vocabulary = logits[0][-1] if isinstance(logits[0][-1], int) else None
        self.past = {
            name: ([s if isinstance(s, int) else 0 for s in i.shape], floats[i.type]) for name, i in past.items()
        }

    def start(self, batch: int = 1) -> dict[str, np.ndarray]:
        """An empty KV cache.

        Raises:
            ModelError: the model's is of a size that no memory holds.
        """
        try:
            return {name: np.zeros([batch, *shape[1:]], dtype) for name, (shape, dtype) in self.past.items()}
        except (MemoryError, ValueError) as error:
            raise ModelError(f"{self.path}: past_key_values: {str(error) or 'out of memory'}") from None

    def step(self, ids: np.ndarray, past: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Runs new tokens.

        Args:
            ids: int64 [B, S]. past: from :meth:`start` or the step before.

        Returns:
            logits [B, S, vocabulary], or [B, 1, vocabulary] of models that give each row's last (``last_only``); and
            the longer cache.

        Raises:
            ModelError: B or S is 0, which the graph's Reshape nodes do not take; ONNX Runtime's words otherwise.
        """
        batch, new = ids.shape
        if not ids.size:
            raise ModelError(f"input_ids has shape {list(ids.shape)}, expected at least one row and one token")
        total = new + past_length(past)
        feed = {
            "input_ids": ids,
            "attention_mask": np.ones((batch, total), np.int64),
            "position_ids": np.tile(np.arange(total - new, total), (batch, 1)),
        }
        try:
            with doing(f"{self.path}: {new} tokens after {total - new}"):
                found = dict(zip(self.outputs, self.session.run(None, feed | past), strict=True))
        except MemoryError:
            raise
        except Exception as error:  # see above
            raise ModelError(f"{self.path}: {error}") from None
        return found["logits"], {name: found[name.replace("past_key_values", "present")] for name in past}

    def scores(self, ids: Sequence[int]) -> np.ndarray:
        """Logits after each of the tokens, f32 [tokens, vocabulary]: one by one where a step gives its last only."""
        past, found, size = self.start(), [], 1 if self.last_only else len(ids)
        for at in range(0, len(ids), size):
            logits, past = self.step(np.array([ids[at : at + size]], np.int64), past)
            found.append(logits[0].astype(np.float32))
        return np.concatenate(found)

    def greedy(self, ids: Sequence[int], max_new_tokens: int = 32, stop: Sequence[int] = ()) -> Generated:
        """The likeliest next token, again and again, until one of ``stop`` or the end of the model's context.

        Raises:
            ModelError: no prompt, one as long as the context, an id outside the vocabulary, logits that are not finite.
        """
        if not len(ids):
            raise ModelError("the prompt has no tokens")
        for id in ids:
            if id < 0 or (self.vocabulary is not None and id >= self.vocabulary):
                raise ModelError(f"token id {id} is outside the vocabulary, 0 to {(self.vocabulary or 2**63) - 1}")
        if len(ids) >= self.context:
            raise ModelError(
                f"{self.path}: a prompt of {len(ids)} tokens leaves no room in the model's context of {self.context}"
            )
        max_new_tokens = min(max_new_tokens, self.context - len(ids))
        past, step = self.start(), np.array([ids], np.int64)
        tokens: list[int] = []
        logits: list[np.ndarray] = []
        begin = first = time.perf_counter()
        while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in stop):
            scores, past = self.step(step, past)
            logits.append(scores[0, -1].astype(np.float32))
            if not np.isfinite(logits[-1]).all():
                raise ModelError(
                    f"{self.path}: logits after {past_length(past)} tokens are not finite: a weight is not, or "
                    f"activations overflow (--dtype f32 has the widest range)"
                )
            tokens.append(int(logits[-1].argmax()))
            step = np.array([[tokens[-1]]], np.int64)
            if len(tokens) == 1:
                first = time.perf_counter()
        return Generated(tokens, np.array(logits), first - begin, time.perf_counter() - first)


def runtime() -> Any:
    """The onnxruntime package.

    Raises:
        ModelError: it is older than the library needs. It would say so itself, but also print a line of its own.
    """
    import onnxruntime as ort

    if tuple(int(part) for part in ort.__version__.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ModelError(
            f"onnxruntime is {ort.__version__}, expected {oldest} or newer; pip install 'onnxruntime>={oldest}'"
        )
    return ort


def past_length(past: dict[str, np.ndarray]) -> int:
    """Tokens in a KV cache."""
    return int(next(iter(past.values())).shape[2])


def stop_tokens(folder: Path) -> list[int]:
    """eos_token_id of generation_config.json, else config.json.

    Raises:
        ModelError: a file is not what it should be.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            if (stop := eos_tokens(json.loads(path.read_text()))) is not None:
                return stop
        except AttributeError:
            raise ModelError(f"{path}: expected a JSON object") from None
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path}: {error}") from None
    return []


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer.json as a tokenizers.Tokenizer.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    from tokenizers import Tokenizer

    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder / 'tokenizer.json'}: missing; give token ids (--ids 1,2,3) instead of a prompt")
    try:
        with doing(str(folder / "tokenizer.json")):
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except MemoryError:
        raise
    except Exception as error:  # tokenizers raises nothing else
        raise ModelError(f"{folder / 'tokenizer.json'}: {error}") from None
