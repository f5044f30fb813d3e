"""Measure the largest error of each architecture, in 40 minutes:

    PYTHONPATH=tests python tests/export/architectures/measure_errors.py [NAME ...]

Writes docs/lab/architecture_errors.csv: the errors of test_architectures.py in float32, by the largest logit.
docs/generate.py makes a table of it. With names, only their rows are measured again.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PATH = HERE.parents[2] / "docs" / "lab" / "architecture_errors.csv"
COLUMNS = ("name", "prompt", "tokens", "padded")


def measure(name: str) -> list[str]:
    """Return a row of the file."""
    from export.architectures.test_architectures import errors

    with tempfile.TemporaryDirectory() as folder:
        found = errors(name, "none", Path(folder))
    return [name, *(f"{found[column]:.1e}" for column in COLUMNS[1:])]


def main(names: list[str]) -> None:
    from export.architectures.test_architectures import ARCHITECTURES

    rows = {}
    if PATH.exists():
        with PATH.open(encoding="utf-8", newline="") as file:
            rows = {row[0]: row for row in [*csv.reader(file)][1:] if row[0] in ARCHITECTURES}
    for name in names or sorted(ARCHITECTURES):
        rows[name] = measure(name)
        print(*rows[name], flush=True)
        with PATH.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *(rows[name] for name in sorted(rows))])


if __name__ == "__main__":
    main(sys.argv[1:])
