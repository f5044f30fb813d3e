"""Pages and tables that docs/generate.py makes."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[3] / "docs"


@cache
def generate() -> ModuleType:
    """Return the module docs/generate.py."""
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(name: str) -> list[list[str]]:
    """Return the cells of a table, without its header."""
    made: str = generate().TABLES[name]()
    return [[cell.strip() for cell in line[1:-1].split(" | ")] for line in made.strip().splitlines()[2:]]
