"""Parameters that are one of each kind: `make test` runs the first, `make test-every` the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest


def every(cases: Iterable[object], brief: int = 1) -> Sequence[object]:
    """For pytest.mark.parametrize: all but the first ``brief`` cases have the mark ``every``."""
    first, others = (cases := list(cases))[:brief], cases[brief:]
    return first + [pytest.param(*c if isinstance(c, tuple) else (c,), marks=pytest.mark.every) for c in others]
