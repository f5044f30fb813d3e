"""Many threads on one session. `make test-tsan` runs this file under ThreadSanitizer."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from support.models.one_layer import in_threads, run, session, write_model
from support.operators.cases import Case

THREADS, RUNS = 8, int(os.environ.get("QUANTMOE_RUNS", 10_000))  # fewer under ThreadSanitizer


@pytest.mark.parametrize("intra_op", [1, 2])
def test_one_session_in_eight_threads(tmp_path: Path, intra_op: int) -> None:
    """10^4 runs in all of prompts of several lengths give the bytes of a run alone."""
    case = Case(hidden=64, intermediate=96, experts=4, act_order="split")
    layer = case.build()
    s = session(write_model(tmp_path / "m.onnx", layer.spec, layer.w13, layer.w2), threads=intra_op)
    inputs = [case.tokens(t, seed=t) for t in (1, 3, 20, 1, 7)]
    want = [run(s, *i).tobytes() for i in inputs]

    def right(i: int) -> bool:
        which = i % len(inputs)
        return run(s, *inputs[which]).tobytes() == want[which]

    assert not (wrong := in_threads(THREADS, RUNS, right)), wrong[:5]
    x, ids, weights = inputs[0]
    ids = np.full_like(ids, 99)
    with pytest.raises(Exception, match="topk_ids"):  # and the session survives an error
        run(s, x, ids, weights)
