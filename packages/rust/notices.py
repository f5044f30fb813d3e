"""Prints what libquantmoe_text contains of others: each crate's name, version and licence, and the licences' texts.

usage: notices.py: needs cargo and the crates' sources, which a build has left.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE")
HEAD = """What libquantmoe_text contains of others. QuantMoE itself is under Apache-2.0 (LICENSE).

Rust's standard library. Copyright (c) The Rust Project contributors. MIT OR Apache-2.0, texts below."""


def crates() -> list[dict[str, Any]]:
    """Return the packages that are linked, without those that only a build or a test needs."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--manifest-path", HERE / "text/Cargo.toml"]
    found = json.loads(subprocess.check_output(command, encoding="utf-8"))
    nodes = {node["id"]: node for node in found["resolve"]["nodes"]}
    seen, left = set(), [found["resolve"]["root"]]
    while left:
        if (one := left.pop()) not in seen:
            seen.add(one)
            left += [d["pkg"] for d in nodes[one]["deps"] if any(kind["kind"] is None for kind in d["dep_kinds"])]
    seen.remove(found["resolve"]["root"])
    return sorted((p for p in found["packages"] if p["id"] in seen), key=lambda p: (p["name"], p["version"]))


def licences(crate: dict[str, Any]) -> list[str]:
    """Return the texts of a crate and of sources that it brings."""
    folder = Path(crate["manifest_path"]).parent
    files = [
        p for place in ("*", "*/*") for p in folder.glob(place) if p.is_file() and p.name.upper().startswith(NAMES)
    ]
    return [path.read_text(encoding="utf-8", errors="replace").strip() for path in sorted(files)]


def notices() -> str:
    """Return the whole file. Each text stands in it once."""
    numbers: dict[str, int] = {}
    lines = [HEAD, ""]
    for crate in crates():
        texts = [str(numbers.setdefault(text, len(numbers) + 1)) for text in licences(crate)]
        lines.append(f"{crate['name']} {crate['version']}. {crate['license']}. Texts: {', '.join(texts) or 'none'}")
    for text, number in numbers.items():
        lines += ["", f"---- text {number} ----", "", text]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(notices(), end="")
