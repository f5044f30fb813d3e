"""Checkpoints on the Hugging Face hub: ``export ORG/MODEL`` fetches them into the hub's own cache."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.folder.files import hub_name

#: files of a repository that an export reads, and copies of the weights that it does not
FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "LICEN*", "NOTICE*", "USE_POLICY*"]
COPIES = ["original/*", "metal/*", "onnx/*", "consolidated*"]


def fetched(checkpoint: Path, *, download: bool = True) -> Path:
    """Return where a checkpoint is on this machine, after a download if it is a model's name on the hub.

    The path stays as it is without huggingface_hub and where the hub does not answer. Opening it then names the command
    that fetches the model.

    Args:
        download: False: take only what an earlier download left in the cache.

    Raises:
        CheckpointError: the hub answers that there is no such model, or that it is for others.
    """
    name = None if checkpoint.exists() else hub_name(checkpoint)
    if name is None or find_spec("huggingface_hub") is None:
        return checkpoint
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(name, allow_patterns=FILES, ignore_patterns=COPIES, local_files_only=not download)
    except LocalEntryNotFoundError:  # no answer, and nothing in the cache
        return checkpoint
    except HfHubHTTPError as error:
        raise CheckpointError(
            f"{name}: the Hugging Face hub answers {error.response.status_code}; expected a model that you may read: "
            "check the name, or log in with hf auth login"
        ) from None
    return Path(folder)
