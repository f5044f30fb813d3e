"""A folder is read at a glance: at most 15 files, or a reason here."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("custom_ops", "exporter", "ort_ext", "trt_plugins", "packages", "samples", "docs", "tests")
MOST = 15
#: folders that may have more files
REASONS = {
    "custom_ops/ops": "the table of operators, found by name: one .def each",
    "docs/guides": "one page for each task, in the order of the site's menu",
    "docs/lab": "one page for each subject that is measured",
    "exporter/reading/formats": "one file for each tool whose checkpoints are read",
    "packages/java/src/main/java/quantmoe": "the folder is the name of Java's package",
    "packages/nuget/src/QuantMoe": "the folder is the name of C#'s project",
    "tests/fixtures/gguf_architectures": "one file for each architecture of llama.cpp",
}
#: what a build or a run leaves beside the sources
MADE = {".so", ".dylib", ".dll", ".pyc", ".svg"}
MADE_FOLDERS = {"__pycache__", "bin", "obj", "target", "node_modules", "tables"}


def files(folder: str) -> list[Path]:
    """Return the sources in a folder and its folders, relative to the root."""
    found = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path for path in found if path.suffix not in MADE and not MADE_FOLDERS & set(path.parts)]


def test_folders_have_few_files() -> None:
    """A folder has at most 15 files, except those with a reason, which need theirs."""
    counts = Counter(path.parent.as_posix() for folder in FOLDERS for path in files(folder))
    assert len(counts) > 100
    assert {folder for folder, count in counts.items() if count > MOST} == set(REASONS)


def test_readme_names_the_folders_of_tests() -> None:
    """tests/README.md says of each folder what it proves."""
    text = (ROOT / "tests/README.md").read_text(encoding="utf-8")
    for parent in ("tests", "tests/export"):
        deep = len(Path(parent).parts)
        folders = {path.parts[deep] for path in files(parent) if len(path.parts) > deep + 1}
        assert len(folders) > 5
        assert {name for name in folders if f"`{name}`" not in text} == set()
