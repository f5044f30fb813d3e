"""Fields of a configuration for single modules: GPTQModel's ``dynamic`` and AutoRound's ``extra_config``."""

from __future__ import annotations

from typing import Any

import regex

from quantmoe.exporter.reading.checkpoint import Checkpoint, CheckpointError
from quantmoe.exporter.reading.weights.base import group_size_of, matches

#: the fields that decide numerics of integers
FIELDS = ("bits", "group_size", "sym", "desc_act")


class Overrides:
    """The fields of the configuration that modules have of their own.

    Of ``dynamic`` the first pattern counts that matches from the beginning of the module's name (GPTQModel's
    dynamic_get). Of ``extra_config`` the module's own name counts, then the first pattern that is found anywhere in its
    name. The name of another module is no pattern (AutoRound's get_layer_config).

    Args:
        names: of the fields that are read.

    Raises:
        CheckpointError: an entry has a group size or fields that cannot be.
    """

    def __init__(self, ckpt: Checkpoint, names: tuple[str, ...] = FIELDS) -> None:
        raw = ckpt.quantization
        self.field = "dynamic" if raw.get("dynamic") else "extra_config"
        #: module -> its fields
        self._named: dict[str, dict[str, Any]] = {}
        #: pattern, its text, fields
        self._rules: list[tuple[regex.Pattern[str], str, dict[str, Any]]] = []
        for key, fields in (raw.get(self.field) or {}).items():
            if not isinstance(fields, dict):
                raise CheckpointError(f"{ckpt.folder}: {self.field}: {key!r} is {fields!r}, expected an object")
            own = {name: fields[name] for name in names if fields.get(name) is not None}
            group_size_of(own.get("group_size", -1))
            if self.field == "dynamic":
                if not key.startswith("-:"):  # which names what is left unquantized; the tensors say so too
                    self._rules.append((regex.compile(key.removeprefix("+:")), key, own))
            elif any(f"{key}.{leaf}" in ckpt for leaf in ("qweight", "weight", "weight_packed")):
                self._named[key] = own
            elif own:
                try:
                    self._rules.append((regex.compile(key), key, own))
                except regex.error:  # which AutoRound skips
                    continue

    def of(self, module: str) -> dict[str, Any]:
        """Return the fields of a module; {}: it has the whole checkpoint's fields."""
        return self._found(module)[1]

    def where(self, module: str) -> str:
        """Return which entry a module's fields are from, for messages; "" without one."""
        key = self._found(module)[0]
        return f" ({self.field} {key!r})" if key else ""

    def _found(self, module: str) -> tuple[str, dict[str, Any]]:
        if module in self._named:
            return module, self._named[module]
        anywhere = self.field == "extra_config"
        rules = ((key, own) for pattern, key, own in self._rules if matches(pattern, module, anywhere))
        return next(rules, ("", {}))
