"""A model that a server runs: an ordinary one, or one of ``export --paged``."""

from __future__ import annotations

import sys
from pathlib import Path

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.interface import BLOCK, PAGED, PAST, present
from quantmoe.exporter.folder.metadata import CONTEXT_LENGTH, IDENTITY
from quantmoe.runtime.buffer import Buffer
from quantmoe.runtime.generate import Generator
from quantmoe.runtime.opened_model import CODES, FLOATS

#: output of an encoder: a text's vector
VECTOR = "sentence_embedding"


class ServedModel(Generator):
    """A model for requests that run together.

    Attributes:
        encoder: it has vectors of texts, and writes none.
        paged: the requests share a cache in blocks. Nothing runs the model except the server.
        indexed: of a paged model, a run gives the logits of the tokens that logits_indices names; else of all.
    """

    encoder = paged = indexed = False

    def _read_interface(self, speculate: str | Path | None, num_logits: int) -> None:
        self.paged = any(value.name == "block_table" for value in self.session.get_inputs())
        self.encoder = any(value.name == VECTOR for value in self.session.get_outputs())
        if self.paged:
            self._read_paged()
        elif self.encoder:
            self._read_ends()
        else:
            super()._read_interface(speculate, num_logits)

    def _read_paged(self) -> None:
        """Read logits and blocks from the session's inputs, outputs and metadata."""
        given = {value.name: value for value in self.session.get_inputs()}
        past = {name: value for name, value in given.items() if name.startswith(f"{PAST}.")}
        logits = next((output for output in self.session.get_outputs() if output.name == "logits"), None)
        outputs = {output.name for output in self.session.get_outputs()}
        self.indexed = "logits_indices" in given
        names = {"input_ids", *PAGED} - (set() if self.indexed else {"logits_indices"})
        if (
            logits is None
            or len(logits.shape) != 2
            or not isinstance(logits.shape[1], int)
            or logits.type not in FLOATS
            or given.keys() - past.keys() != names
            or not past
            or not all(len(i.shape) == 4 and i.shape[1] == BLOCK for i in past.values())
            or not all(i.type in FLOATS | CODES and present(i.name) in outputs for i in past.values())
        ):
            raise ModelError(
                f"{self.path}: expected the output logits [num_logits, vocabulary], the inputs input_ids, "
                f"{', '.join(PAGED)}, and {PAST}.* [num_blocks, {BLOCK}, heads, width]"
            )
        self._read_ends()
        self.vocabulary, self._logits = logits.shape[1], FLOATS[logits.type]
        self.past = {name: ([0, *i.shape[1:]], (FLOATS | CODES)[i.type]) for name, i in past.items()}

    def _read_ends(self) -> None:
        """Read what all models have, and set what these lack."""
        metadata = self.session.get_modelmeta().custom_metadata_map
        self.context, self.short_context = self._tokens_of(metadata, CONTEXT_LENGTH), sys.maxsize
        self.identity = metadata.get(IDENTITY, "")
        self.outputs = [output.name for output in self.session.get_outputs()]
        self.rows, self.every_row, self.window, self.states = 1, False, 1, []
        self.vocabulary, self.past = None, {}
        self.shares_buffer, self.hidden, self.takes_hidden = True, "", False

    def logits_of(self, new: int, device: str, batch: int = 1) -> Buffer:
        if not self.paged:
            return super().logits_of(new, device, batch)
        assert self.vocabulary is not None  # the interface has it
        return Buffer.empty([new * batch, self.vocabulary], self._logits, device)
