"""The fields of a GGUF file that say what its model is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.gguf.header import Strings, shown

#: keys that change what a model computes -> the value that changes nothing
MATTER = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "attention.sliding_window": 0,
    "attention.temperature_scale": 0.0,
    "attention.value_scale": 1.0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "expert_group_count": 1,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "moe_latent_size": 0,
    "residual_scale": 1.0,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "router_logit_softcapping": 0.0,
    "swiglu_clamp_exp": 0.0,
    "swiglu_clamp_shexp": 0.0,
}
#: tokens after which llama.cpp ends a text, whatever the metadata says
END_TEXTS = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
     "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
     "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[")
)  # fmt: skip
#: the same of tokens that fill in the middle of code: where the metadata lacks the key, one of these texts
FILL_TEXTS = {
    "fim_pad": {"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"},
    "fim_rep": {"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"},
    "fim_sep": {"<|file_sep|>"},
}
#: a token that ends no text beside certain others that do: of gpt-oss and Solar a message's end, of Gemma 4 a tag
NO_ENDS = (
    ("<|end|>", ("<|return|>", "<|call|>")),
    ("<|end|>", ("<|return|>", "<|calls|>")),
    ("<|end|>", ("<|flush|>", "<|call|>")),
    ("<|end|>", ("<|flush|>", "<|calls|>")),
    ("</s>", ("<|tool_response>",)),
    ("</s>", ("<|plamo:eos|>",)),
)


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """A file's fields, and its tensors' shapes. Methods take the key of a field without the architecture.

    Attributes:
        read: keys that were asked for.
        vector: reads a tensor of floats.
    """

    path: Path
    architecture: str
    fields: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    vector: Callable[[str], np.ndarray]
    read: set[str] = field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return self.fields.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a field that is positive, or may be 0 where the default is.

        Raises:
            CheckpointError: it is missing without a default, or something else.
        """
        found = self.get(key, default)
        if type(found) is not int or found < (1 if default is None else 0):
            raise self._error(key, found, "a positive integer")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number, in f32's shortest decimal: 1e-6, and not 9.999999974752427e-07.

        Raises:
            CheckpointError: it is missing without a default, or something else.
        """
        found = self.get(key, default)
        if type(found) not in (int, float) or not found > 0:
            raise self._error(key, found, "a positive number")
        return float(str(np.float32(found))) if type(found) is float else float(found)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a field that is true or false.

        Raises:
            CheckpointError: it is something else.
        """
        found = self.get(key, default)
        if type(found) is not bool:
            raise self._error(key, found, "true or false")
        return found

    def check_read(self) -> None:
        """Refuse a key that changes what the model computes, if nobody asked for it.

        Raises:
            CheckpointError: naming the key.
        """
        for key, neutral in MATTER.items():
            found = self.fields.get(f"{self.architecture}.{key}", neutral)
            if key not in self.read and np.any(np.asarray(found) != neutral):
                raise self._error(key, found, f"{neutral}: other values are not read of {self.architecture}")

    @property
    def layers(self) -> int:
        """Layers of the model, without layers that draft.

        Raises:
            CheckpointError: there are none, or more than the file has tensors.
        """
        found = self.integer("block_count") - self.integer("nextn_predict_layers", 0)
        if not 0 < found <= len(self.shapes):
            raise self._error("block_count", found, f"1 to {len(self.shapes)} layers, the number of tensors")
        return found

    def layer_has(self, stem: str) -> list[bool]:
        """Return whether each layer has a tensor ``blk.<layer>.<stem>``, with ``.weight`` if nothing else is said."""
        end = stem if "." in stem else f"{stem}.weight"
        return [f"blk.{i}.{end}" in self.shapes for i in range(self.layers)]

    def has(self, stem: str) -> bool:
        """Return whether any layer has such a tensor."""
        return any(self.layer_has(stem))

    def rows(self, stem: str) -> int:
        """Return the rows of a layer's tensor of this name; 0 if no layer has one."""
        ends = f".{stem}.weight"
        return next((shape[0] for name, shape in self.shapes.items() if name.endswith(ends)), 0)

    def by_layer(self, key: str, default: int | None = None) -> list[int]:
        """Return a field that is one number of all layers, or a list of numbers of each layer.

        Raises:
            CheckpointError: it is something else, or a list that is too short.
        """
        if not isinstance(self.get(key), np.ndarray):
            return [self.integer(key, default)] * self.layers
        found = self.integers(key)[: self.layers]
        if len(found) < self.layers:
            raise self._error(key, found, f"a number for each of {self.layers} layers")
        return found

    def integers(self, key: str) -> list[int]:
        """Return a list of numbers; true is 1.

        Raises:
            CheckpointError: it is something else.
        """
        found = self.get(key)
        if isinstance(found, np.ndarray) and found.dtype.kind == "b":
            found = found.astype(int)
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or (found < 0).any():
            raise self._error(key, found, "a list of integers")
        return [int(n) for n in found]

    def numbers(self, key: str) -> list[float]:
        """Return a list of numbers of each layer, 0 where there is none; [] where the file has no list.

        Raises:
            CheckpointError: it is something else, or a list that is too short.
        """
        if (found := self.get(key)) is None:
            return []
        if not isinstance(found, np.ndarray) or found.dtype.kind != "f" or len(found) < self.layers:
            raise self._error(key, found, f"a number for each of {self.layers} layers")
        return [float(str(n)) for n in found[: self.layers]]

    def token(self, key: str) -> int | None:
        """Return a token of the vocabulary; None where the file names none, or as llama.cpp has it a number beyond.

        Raises:
            CheckpointError: it is not a number.
        """
        name = f"tokenizer.ggml.{key}_token_id"
        found = self.fields.get(name, -1)
        if type(found) is not int:
            raise CheckpointError(f"{self.path}: {name} is {shown(found)}, expected a token's number")
        return found if 0 <= found < self.shapes["token_embd.weight"][0] else None

    def ends(self) -> list[int]:
        """Return the tokens after which llama.cpp ends a text.

        The metadata names some; the first is eos. llama.cpp knows others by their text (special_eog_ids of
        llama-vocab.cpp).
        """
        texts = self.fields.get("tokenizer.ggml.tokens")
        known = END_TEXTS.union(*FILL_TEXTS.values(), *(others for _, others in NO_ENDS))
        by_text = {text: i for i, text in enumerate(texts) if text in known} if isinstance(texts, Strings) else {}
        named = [token for key in ("eos", "eot", "eom") if (token := self.token(key)) is not None]
        for key, other in FILL_TEXTS.items():
            token = self.token(key)
            named += sorted(by_text[text] for text in other & by_text.keys())[:1] if token is None else [token]
        found = dict.fromkeys([*named, *sorted(by_text[text] for text in END_TEXTS & by_text.keys())])
        for text, others in NO_ENDS:
            if text in by_text and all(by_text.get(other) in found for other in others):
                found.pop(by_text[text], None)
        return list(found)

    def _error(self, key: str, found: object, want: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.architecture}.{key} is {shown(found)}, expected {want}")
