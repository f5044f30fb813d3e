"""Parameters that are one of each kind: `make test` runs the first, `make test-every` the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest


def every(cases: Iterable[object], brief: int = 1) -> Sequence[object]:
    """For pytest.mark.parametrize: all but the first ``brief`` cases have the mark ``every``."""
    cases = list(cases)
    others = (case if isinstance(case, tuple) else (case,) for case in cases[brief:])
    return cases[:brief] + [pytest.param(*case, marks=pytest.mark.every) for case in others]
