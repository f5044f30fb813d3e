"""`digest.py KERNEL...`: digests of the inputs and of the kernels' outputs, a case a line; machines must agree.

All usable kernels when none is named; a line that has two output digests is two kernels that disagree.
"""

import hashlib
import os
import sys
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.operators.attention import CACHES, CODES, SPECS, ragged
from support.operators.cases import CASES
from support.operators.linear_attention import CONVS, DELTAS, RAGGED, conv_inputs, delta_inputs

from quantmoe.custom_ops import native


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()[:16]


usable = [kernel for kernel, runs in native.kernels().items() if runs]
kernels = sys.argv[1:] or usable
if missing := set(kernels) - set(usable):
    sys.exit(f"digest.py: {', '.join(sorted(missing))} cannot run here")
for case in CASES:
    layer = case.build()
    tokens = [case.tokens(t) for t in (3, 19)]  # experts of one row, and tiles of every number of units
    outputs = set()
    for kernel in kernels:
        os.environ["QUANTMOE_FORCE_KERNEL"] = kernel
        run = layer.native()
        outputs.add(digest(*(run(*t) for t in tokens)))
    print(digest(layer.w13, layer.w2, *(array for t in tokens for array in t)), *sorted(outputs), case)
for (name, spec), cache in [*product(SPECS.items(), CACHES[1:2]), *product([*SPECS.items()][::4], CODES)]:
    a, outputs = ragged(spec, cache=cache), set()
    for kernel in kernels:
        os.environ["QUANTMOE_FORCE_KERNEL"] = kernel
        outputs.add(digest(*a.run()))
    print(
        digest(a.qkv, *a.past, a.rows, *a.others),
        *sorted(outputs),
        "attention",
        name,
        cache if cache in CODES else np.dtype(cache),
    )
states = [(name, conv_inputs(spec, RAGGED, 9)) for name, spec in CONVS.items()]
states += [(name, delta_inputs(spec, [[2, 40, 3], [0, 45, 0]], 45)) for name, spec in DELTAS.items()]
for name, call in states:
    outputs = set()
    for kernel in kernels:
        os.environ["QUANTMOE_FORCE_KERNEL"] = kernel
        outputs.add(digest(*call.run()))
    print(digest(*call.tensors), *sorted(outputs), call.spec.OP, name)
print(f"digest.py: {', '.join(kernels)}", file=sys.stderr)
