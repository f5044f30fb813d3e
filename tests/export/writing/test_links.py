"""Links that lead to no file, as an interrupted download into a cache leaves them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import quantmoe
from quantmoe.exporter.folder.chat_template import load_template
from quantmoe.exporter.folder.json_files import read_object
from quantmoe.exporter.folder.tokenizer import load_tokenizer


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("tokenizer.json", load_tokenizer),
        ("chat_template.jinja", load_template),
        ("tokenizer_config.json", load_template),
        ("generation_config.json", lambda folder: read_object(folder / "generation_config.json")),
    ],
)
def test_a_link_to_nothing_is_named(tmp_path: Path, name: str, read: object) -> None:
    """The model would have run with another tokenizer, without its template or without its end tokens."""
    (tmp_path / name).symlink_to("gone")
    with pytest.raises(quantmoe.ModelError, match=rf"{name}: links to gone, which is not there"):
        read(tmp_path)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "LICENSE"])
def test_a_checkpoints_link_to_nothing_is_named(checkpoint, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "m"))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("gone")
    with pytest.raises(quantmoe.CheckpointError, match=rf"{name}: links to .*gone, which is not there"):
        quantmoe.export(folder, tmp_path / "out")
