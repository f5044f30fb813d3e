"""Files of a checkpoint that go with a model: configuration, tokenizer, licences."""

from __future__ import annotations

from pathlib import Path

from quantmoe.exporter.errors import CheckpointError, ModelError
from quantmoe.exporter.folder.files import CONFIG, GENERATION_CONFIG, SPECIAL_TOKENS
from quantmoe.exporter.folder.json_files import vocabulary_of
from quantmoe.exporter.folder.sampling_options import sampling_of
from quantmoe.exporter.folder.tokenizer import ENDS, NAMED, NAMED_TEMPLATES, end_tokens, named_token
from quantmoe.exporter.reading.checkpoint import Checkpoint

#: files of a checkpoint that clients of the model need
COMPANIONS = (CONFIG, GENERATION_CONFIG, "tokenizer*", SPECIAL_TOKENS, "added_tokens.json",
              "vocab.*", "merges.txt", "chat_template*", "*.model")  # fmt: skip
#: how names of those begin, in any case, that say who may use it and how
LICENSES = ("license", "licence", "notice", "use_policy", "copying", "third_party", "third-party", "thirdparty")


def check_companions(ckpt: Checkpoint) -> None:
    """Refuse links to elsewhere (nobody's private file goes into a folder that is passed on), and a
    generation_config.json that ``generate`` would refuse. ``ckpt.check_unchanged`` then looks at these files, too.

    Raises:
        CheckpointError: naming the file, and where it leads or which field is wrong.
    """
    for path in [*companion_files(ckpt.folder), *ckpt.folder.glob(f"{NAMED_TEMPLATES}/*.jinja")]:  # of a GGUF file none
        ckpt.check_file(path)
        ckpt.see(path)
    generation, config, folder = ckpt.generation_config, ckpt.config, ckpt.folder
    try:
        sampling_of(generation, folder / ENDS[0], vocabulary_of(config))
        end_tokens(generation, config, folder)
        for name in NAMED:
            named_token(name, generation, config, folder)
    except ModelError as error:
        raise CheckpointError(str(error)) from None


def companion_files(checkpoint: Path) -> list[Path]:
    found = {path for pattern in COMPANIONS for path in checkpoint.glob(pattern)}
    found |= {path for path in checkpoint.glob("*") if path.name.lower().startswith(LICENSES)}
    return sorted(path for path in found if path.is_file() or path.is_symlink())
