"""Layout marlin: exact round trips, and its bytes against FORMAT.md section 3 read word by word."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuda.formats import FORMATS
from support.operators.cases import K_QUANTS, assert_same
from support.operators.marlin_rows import GROUPED, reference_row, reference_rows
from support.operators.specs import linear_spec, moe_spec

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import marlin
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.schemes import SCHEMES

KINDS = sorted({("int4", "f16"), ("int4", "bf16"), *(weights[:2] for weights, *_ in FORMATS.values())})


#: (row less g, i of column c(i)) -> nibble of a word
NIBBLES = {(0, 0): 0, (0, 2): 1, (8, 0): 2, (8, 2): 3, (0, 1): 4, (0, 3): 5, (8, 1): 6, (8, 3): 7}


def random_matrix(rng, n, k, kind, group, scale_type, *, zero_points=False, bias=False, **fields):
    block_n, group = fields.get("block_n", 1), 256 if kind in K_QUANTS else group
    shape = (-(-n // block_n), 1 if group == -1 else -(-k // group))
    dtype = SCALE_DTYPES[scale_type]
    codes = rng.integers(0, 1 << SCHEMES[kind].bits, (n, k), np.uint8)
    if kind == "fp8_e4m3":
        codes[codes & 0x7F == 0x7F] -= 1  # NaN
    return QuantizedMatrix(
        kind=kind,
        codes=codes,
        scales=rng.integers(0, 120, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0],
        group_size=group,
        zero_points=rng.integers(0, 1 << SCHEMES[kind].bits, shape, np.uint8) if zero_points else None,
        global_scale=float(np.float32(rng.random())) if kind == "nvfp4" else None,
        bias=rng.standard_normal(n).astype(np.float32) if bias else None,
        **fields,
    )


def round_trip(expert: Expert, activation_format: str = "none") -> Expert:
    w13, w2 = marlin.describe(expert, activation_format)
    gated = int(expert.gate is not None)
    spec = moe_spec(1, expert.hidden_size, expert.intermediate_size, w13, w2, gated=gated)
    rows = [np.full(marlin.row_bytes(spec, p), 0xA5, np.uint8) for p in ("w13", "w2")]
    assert all(len(r) % 64 == 0 for r in rows)
    marlin.pack(expert, spec, *rows)
    for have, want in zip(rows, reference_rows(expert, spec), strict=True):
        assert have.tobytes() == want.tobytes()
    return marlin.unpack(spec, *rows)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    hidden=st.integers(1, 320),
    intermediate=st.integers(1, 200),
    kind=st.sampled_from(KINDS),
    group=st.sampled_from([-1, 16, 32, 64, 128]),
    gated=st.booleans(),
    zero_points=st.booleans(),
    bias=st.booleans(),
    act_order=st.sampled_from(["none", "shared", "split", "up"]),
    down_order=st.booleans(),
    pre_scale=st.booleans(),
    activation_format=st.sampled_from(["none", "fp8_token", "fp8_tensor", "nvfp4"]),
)
def test_round_trip(
    seed,
    hidden,
    intermediate,
    kind,
    group,
    gated,
    zero_points,
    bias,
    act_order,
    down_order,
    pre_scale,
    activation_format,
):
    rng = np.random.default_rng(seed)
    kind, scale_type = kind
    orders = [rng.permutation(hidden).astype(np.int32) for _ in "ug"]
    orders = {"none": [None, None], "shared": orders[:1] * 2, "split": orders, "up": [orders[0], None]}[act_order]
    options = {"zero_points": zero_points and kind in ("int4", "int8"), "bias": bias}
    if activation_format in ("fp8_tensor", "nvfp4"):
        options["input_scale"] = float(np.float32(rng.uniform(0.1, 1)))
    pre = rng.uniform(0.5, 2, hidden).astype(np.float32) if pre_scale else None
    up, gate = (
        random_matrix(rng, intermediate, hidden, kind, group, scale_type, perm=perm, pre_scale=pre, **options)
        for perm in (orders if gated else orders[:1] * 2)
    )
    pre = rng.uniform(0.5, 2, intermediate).astype(np.float32) if pre_scale else None
    if down_order and activation_format not in GROUPED:
        options["perm"] = rng.permutation(intermediate).astype(np.int32)
    down = random_matrix(rng, hidden, intermediate, kind, group, scale_type, pre_scale=pre, **options)
    expert = Expert(gate if gated else None, up, down)
    found = round_trip(expert, activation_format)
    for name in ("gate", "up", "down"):
        a, b = getattr(expert, name), getattr(found, name)
        assert_same(a, b)


def test_block_scales_round_trip():
    rng = np.random.default_rng(1)
    gate, up = (random_matrix(rng, 200, 384, "fp8_e4m3", 128, "f32", block_n=128) for _ in "gu")
    expert = Expert(gate, up, random_matrix(rng, 384, 200, "fp8_e4m3", 128, "f32", block_n=128))
    found = round_trip(expert)
    for name in ("gate", "up", "down"):
        assert_same(getattr(expert, name), getattr(found, name))


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_one_matrix_of_two_has_zero_points(kind):
    """The other's are the middle, whether it is beside it or in another expert of the layer."""
    rng = np.random.default_rng(1)
    gate, up, down = (random_matrix(rng, n, k, kind, 32, "f16") for n, k in ((96, 64), (96, 64), (64, 96)))
    other = random_matrix(rng, 96, 64, kind, 32, "f16", zero_points=True)
    w13, w2 = marlin.describe(Expert(gate, other, down), "none")
    spec = moe_spec(1, 64, 96, w13, w2)
    for expert in (Expert(gate, other, down), Expert(other, gate, down), Expert(gate, up, down)):
        rows = [np.zeros(marlin.row_bytes(spec, name), np.uint8) for name in ("w13", "w2")]
        marlin.pack(expert, spec, *rows)
        found = marlin.unpack(spec, *rows)
        for name in ("gate", "up", "down"):
            np.testing.assert_array_equal(getattr(found, name).dequantize(), getattr(expert, name).dequantize())


@pytest.mark.parametrize("gated", [False, True])
def test_down_act_order_moves_to_rows_of_gate_and_up(gated):
    """The kernels read rows that need no order of down's; unpack gives back what was packed."""
    rng = np.random.default_rng(2)
    perm = rng.permutation(96).astype(np.int32)
    gate, up = (random_matrix(rng, 96, 64, "int4", 32, "f16", zero_points=True, bias=True) for _ in "gu")
    pre = rng.uniform(0.5, 2, 96).astype(np.float32)
    down = random_matrix(rng, 64, 96, "int4", 32, "f16", perm=perm, pre_scale=pre)
    expert = Expert(gate if gated else None, up, down)
    found = round_trip(expert)
    for name in ("gate", "up", "down") if gated else ("up", "down"):
        assert_same(getattr(expert, name), getattr(found, name))
    # As the kernels read the rows, without down's order.
    w13, w2 = marlin.describe(expert, "none")
    spec = moe_spec(1, 64, 96, w13, w2, gated=int(gated))
    rows = [np.zeros(marlin.row_bytes(spec, name), np.uint8) for name in ("w13", "w2")]
    marlin.pack(expert, spec, *rows)
    plain = dataclasses.replace(spec, w2=dataclasses.replace(w2, perm=0))
    stored = marlin.unpack(plain, rows[0], np.zeros(marlin.row_bytes(plain, "w2"), np.uint8)).up
    np.testing.assert_array_equal(stored.dequantize(), up.dequantize()[perm])
    stored = dataclasses.replace(marlin.unpack_down(spec, rows[1]), perm=None)
    np.testing.assert_array_equal(stored.pre_scale, pre[perm])
    # down[n, perm[j]] multiplies row perm[j] of the activations: stored column j meets stored row j.
    np.testing.assert_array_equal(stored.dequantize(), down.dequantize()[:, perm])


def test_bytes_are_the_documented_ones():
    """Every code found where FORMAT.md 3.2 says it is, computed here lane by lane."""
    rng = np.random.default_rng(3)
    H, I = 72, 20  # noqa: E741
    gate, up = (random_matrix(rng, I, H, "int4", 32, "bf16") for _ in "gu")
    expert = Expert(gate, up, random_matrix(rng, H, I, "int8", -1, "f16"))
    w13, w2 = marlin.describe(expert, "none")
    spec = moe_spec(1, H, I, w13, w2)
    a, b = (np.zeros(marlin.row_bytes(spec, p), np.uint8) for p in ("w13", "w2"))
    marlin.pack(expert, spec, a, b)
    for p in range(3):
        for unit in range(2):
            for lane in range(32):
                g, t = divmod(lane, 4)
                for s in range(4):
                    at = ((p * 2 + unit) * 32 + lane) * 16 + s * 4
                    word = int(a[at : at + 4].view(np.uint32)[0])
                    for (row, i), n in NIBBLES.items():
                        column = 64 * unit + 32 * (s // 2) + 8 * t + 4 * (s % 2) + i
                        source = gate if row == 0 else up
                        want = source.codes[8 * p + g, column] if 8 * p + g < I and column < H else 8
                        assert word >> 4 * n & 15 == want
    for p in range(5):
        for lane in range(32):
            g, t = divmod(lane, 4)
            for s in range(4):
                for row in (0, 8):
                    at = p * 1024 + 64 * (row + g) + 16 * (t ^ g // 2) + 8 * (s // 2 ^ t % 2) + 4 * (s % 2)
                    for position, i in enumerate((0, 2, 1, 3)):
                        column = 32 * (s // 2) + 8 * t + 4 * (s % 2) + i
                        n = 16 * p + row + g
                        want = expert.down.codes[n, column] if n < H and column < I else 128
                        assert b[at + position] == want
    # 3 panels of 2 units; scales [panel][block][g][j][gate, up].
    scales = a[3 * 2 * 512 : 3 * 2 * 512 + 3 * 2 * 8 * 2 * 2 * 2].view(np.uint16).reshape(3, 2, 8, 2, 2)
    assert scales[1, 0, 3, 1, 0] == gate.scales.view(np.uint16)[11, 1]
    assert scales[2, 1, 2, 0, 1] == up.scales.view(np.uint16)[18, 2]


@pytest.mark.parametrize("kind", K_QUANTS)
def test_bytes_of_k_quants(kind):
    """Every code and scale found where FORMAT.md 3.2 and 3.3 say it is."""
    rng = np.random.default_rng(7)
    n, k, bits = 40, 320, SCHEMES[kind].bits
    m = random_matrix(rng, n, k, kind, 256, K_QUANTS[kind][1])
    spec = linear_spec(k, n, marlin.describe_down(m, "none"))
    row = np.zeros(marlin.row_bytes(spec.moe, "w2"), np.uint8)
    marlin.pack_down(m, spec.moe, row)
    panels, units, size = 3, 5, 128 * bits
    for row_, column in np.ndindex(panels * 16, units * 64):
        unit = row[(row_ // 16 * units + column // 64) * size :][:size]
        low, high = unit[:512].view(np.uint32), unit[512:].view(np.uint32)
        lane, s = row_ % 8 * 4 + column % 32 // 8, column % 64 // 32 * 2 + column % 8 // 4
        place = NIBBLES[row_ % 16 // 8 * 8, column % 4]
        code = int(low[4 * lane + s]) >> 4 * place & 15
        if bits > 4:
            at = (bits - 4) * (4 * s + place % 4)
            word = int(high[(bits - 4) * lane + at // 16]) >> at % 16 + place // 4 * 16
            code |= (word & (1 << bits - 4) - 1) << 4
        assert code == (m.codes[row_, column] if row_ < n and column < k else 0)
    scales = row[panels * units * size :][: panels * 2 * 16 * m.scales.itemsize].reshape(panels, 2, -1)
    for row_, block in np.ndindex(panels * 16, 2):
        of, place = scales[row_ // 16, block], row_ % 8 * 2 + row_ % 16 // 8
        want = m.scales[row_, block] if row_ < n else np.zeros((), m.scales.dtype)  # zero bits past the end
        factors = [want["d"]] if kind == "q6_k" else [want["d"], want["d_min"]]
        np.testing.assert_array_equal(of[2 * len(factors) * place :][: 2 * len(factors)].view("<f2"), factors)
        for unit in range(4):
            found = of[32 * len(factors) + 64 * unit + 4 * place :][:4].view(np.int8)
            pair = slice(2 * unit, 2 * unit + 2)
            levels = (
                [want["scales"][pair], want["minima"][pair]] if len(factors) == 2 else [want["scales"][4 * unit :][:4]]
            )
            np.testing.assert_array_equal(found, np.concatenate(levels))


def test_bytes_of_input_scales_and_pre_scales():
    """FORMAT.md 3.5: the last parts of a row, after the permutation."""
    rng = np.random.default_rng(5)
    perm, pre = rng.permutation(72).astype(np.int32), rng.uniform(0.5, 2, 72).astype(np.float32)
    m = random_matrix(rng, 16, 72, "int4", -1, "bf16", perm=perm, pre_scale=pre, input_scale=0.375)
    spec = linear_spec(72, 16, marlin.describe_down(m, "nvfp4"))
    row = np.zeros(marlin.row_bytes(spec.moe, "w2"), np.uint8)
    marlin.pack_down(m, spec.moe, row)
    # 1 panel of 2 units of 512 bytes, 16 scales, 72 columns' permutation and pre-scales, each at a multiple of 64.
    assert len(row) == 1024 + 64 + 320 + 64 + 320
    np.testing.assert_array_equal(row[1088 : 1088 + 288].view(np.int32), perm)
    assert row[1408:1412].view(np.float32) == 0.375
    np.testing.assert_array_equal(row[1472 : 1472 + 288].view(np.float32), pre)
    assert not row[1412:1472].any()


def test_refusals_name_what_is_wrong():
    rng = np.random.default_rng(4)
    up = random_matrix(rng, 32, 64, "int4", 32, "f16")
    down = random_matrix(rng, 64, 32, "int4", 32, "f16")
    with pytest.raises(ValueError, match="gate and up differ in group_size"):
        marlin.describe(Expert(random_matrix(rng, 32, 64, "int4", 64, "f16"), up, down), "none")
    with pytest.raises(ValueError, match="group_size 48"):
        marlin.describe(Expert(None, random_matrix(rng, 32, 96, "int4", 48, "f16"), down), "none")
    for name in ("nvfp4", "fp8_tensor"):
        with pytest.raises(ValueError, match=f"up: activation_format {name} without an input_scale"):
            marlin.describe(Expert(None, up, down), name)
    gate, scaled = (dataclasses.replace(up, input_scale=scale) for scale in (0.5, 0.25))
    with pytest.raises(ValueError, match=r"different input scales, 0.5 and 0.25; .*--activations float"):
        marlin.describe(Expert(gate, scaled, down), "nvfp4")
    marlin.describe(Expert(gate, scaled, down), "mxfp4")
    gate, scaled = (dataclasses.replace(up, pre_scale=np.full(64, v, np.float32)) for v in (1, 2))
    with pytest.raises(ValueError, match="different pre-scales"):
        marlin.describe(Expert(gate, scaled, down), "none")
    ordered = dataclasses.replace(down, perm=np.arange(32, dtype=np.int32)[::-1].copy())
    with pytest.raises(ValueError, match=r"down: w2_perm is 1 with w2_activation_format mxfp8, .*--activations float"):
        marlin.describe(Expert(up, up, ordered), "mxfp8")
    marlin.describe(Expert(up, up, ordered), "mxfp8", "fp8_token")
    w13, w2 = marlin.describe(Expert(up, up, down), "none")
    spec = moe_spec(1, 64, 32, w13, w2)
    with pytest.raises(ValueError, match=r"expected uint8 \["):
        marlin.pack(Expert(up, up, down), spec, np.zeros(64, np.uint8), np.zeros(64, np.uint8))
    for change, why in (
        ({"layout_version": 1}, "w2: layout marlin version 1, expected marlin version 2: export the model again"),
        ({"group_size": 48}, "w2: group_size 48; layout marlin carries -1, 16, 32, multiples of 64"),
        ({"format": "q4_k"}, "w2: group_size 32 with f16 scales; q4_k and q5_k have k32 scales, .* in groups of 256"),
        ({"format": "q6_k", "group_size": 256, "scale_type": "k32"}, "w2: group_size 256 with k32 .* q6_k has k16"),
        ({"format": "bf16"}, "w2: group_size 32; layout marlin carries -1 of floats"),
        ({"format": "mxfp4", "zero_points": 1}, "w2: zero_points is 1, expected 0 to 0"),
        ({"perm": 2}, "w2: perm is 2, expected 0 to 1"),
    ):
        with pytest.raises(ValueError, match=why):
            marlin.row_bytes(dataclasses.replace(spec, w2=dataclasses.replace(w2, **change)), "w2")


@pytest.mark.parametrize("group", [-1, 16, 32, 64, 128])
@pytest.mark.parametrize("zero_points", [False, True])
def test_two_orders_are_a_product_of_both(group, zero_points):
    """FORMAT.md 3.4: the stored matrix, of K' columns without an order, times x in gate's and in up's order."""
    rng = np.random.default_rng(5)
    n, k = 24, 152
    gate, up = (
        random_matrix(
            rng, n, k, "int4", group, "f16", zero_points=zero_points, perm=rng.permutation(k).astype(np.int32)
        )
        for _ in "gu"
    )
    w13, w2 = marlin.describe(Expert(gate, up, random_matrix(rng, k, n, "int4", group, "f16")), "none")
    assert (w13.perm, w2.perm) == (2, 0)
    row = np.full(marlin.row_bytes(spec := moe_spec(1, k, n, w13, w2), "w13"), 0xA5, np.uint8)
    marlin.pack(
        Expert(gate, up, random_matrix(rng, k, n, "int4", group, "f16")),
        spec, row, np.zeros(marlin.row_bytes(spec, "w2"), np.uint8),
    )  # fmt: skip
    half = -(-k // max(group, 64)) * max(group, 64)
    wide = moe_spec(1, 2 * half, n, dataclasses.replace(w13, perm=0), w2)
    stored = marlin.unpack(wide, row[: marlin.row_bytes(wide, "w13")], np.zeros(marlin.row_bytes(wide, "w2"), np.uint8))
    orders = row[marlin.row(spec, "w13").part("perm")].view(np.int32).reshape(2, -1)[:, :k]
    x = rng.standard_normal(k)
    gathered = np.zeros(2 * half)
    for h, order in enumerate(orders):
        gathered[h * half : h * half + k] = x[order]
    for m, original in ((stored.gate, gate), (stored.up, up)):
        np.testing.assert_allclose(m.dequantize() @ gathered, original.dequantize() @ x, rtol=1e-9)


def test_an_expert_with_one_order_among_experts_with_two():
    rng = np.random.default_rng(6)
    perms = [rng.permutation(64).astype(np.int32) for _ in range(2)]
    up, gate = (random_matrix(rng, 16, 64, "int4", 32, "f16") for _ in "ug")
    down = random_matrix(rng, 64, 16, "int4", 32, "f16")
    two = marlin.describe(Expert(dataclasses.replace(gate, perm=perms[1]), up, down))[0]
    assert two.perm == 2
    for perm in (None, perms[0]):
        expert = Expert(*(dataclasses.replace(m, perm=perm) for m in (gate, up)), down)
        spec = moe_spec(1, 64, 16, two, marlin.describe(expert)[1])
        rows = [np.zeros(marlin.row_bytes(spec, p), np.uint8) for p in ("w13", "w2")]
        marlin.pack(expert, spec, *rows)
        found = marlin.unpack(spec, *rows)
        assert_same(found.gate, expert.gate)
        assert_same(found.up, expert.up)


@pytest.mark.parametrize(("kind", "scale_type"), KINDS)
def test_a_linear_keeps_its_act_order(kind, scale_type):
    rng = np.random.default_rng(0)
    m = random_matrix(rng, 40, 72, kind, 32, scale_type, bias=True, perm=rng.permutation(72).astype(np.int32))
    spec = linear_spec(72, 40, marlin.describe_down(m, "none"))
    row = np.full(marlin.row_bytes(spec.moe, "w2"), 0xA5, np.uint8)
    marlin.pack_down(m, spec.moe, row)
    assert row.tobytes() == reference_row([m], spec.w).tobytes()
    assert_same(m, marlin.unpack_down(spec.moe, row))
    if kind in K_QUANTS:
        return  # test_bytes_of_k_quants
    scales = row[marlin.row(spec.moe, "w2").part("scales")].reshape(3, -1, 8, 2, 2, SCALE_DTYPES[scale_type].itemsize)
    assert not scales[2, :, :, :, 1].any(), "rows past the end have zero bits, whatever the type"
    assert not scales[:, 1, :, 1].any(), "groups past the end too"


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_floats_of_a_linear(kind):
    """Units of 16 rows x 64 columns as they are, padded with zeros."""
    codes = np.random.default_rng(0).integers(0, 0x3C00, (40, 72), np.uint16)
    m = QuantizedMatrix(
        kind=kind, codes=codes, scales=np.ones((40, 1), np.float32), group_size=-1, bias=np.arange(40, dtype=np.float32)
    )
    spec = linear_spec(72, 40, marlin.describe_down(m, "none"))
    row = np.full(marlin.row_bytes(spec.moe, "w2"), 0xA5, np.uint8)
    marlin.pack_down(m, spec.moe, row)
    assert_same(m, marlin.unpack_down(spec.moe, row))
    stored = row[marlin.row(spec.moe, "w2").part("codes")].view(np.uint16).reshape(3, 2, 16, 64)
    assert np.array_equal(stored[2, 1, :8, :8], codes[32:, 64:])
    assert not stored[2, :, 8:].any()
    assert not stored[:, 1, :, 8:].any()
    with pytest.raises(ValueError, match=f"down: format {kind} has one scale of 1"):
        marlin.describe_down(dataclasses.replace(m, scales=m.scales * 2), "none")


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("gated", [True, False])
def test_floats_of_an_expert(kind, gated):
    """A panel of w13 has eight rows of gate, then eight of up."""
    rng = np.random.default_rng(0)

    def matrix(n: int, k: int) -> QuantizedMatrix:
        codes = rng.integers(0, 0x3C00, (n, k), np.uint16)
        bias = rng.standard_normal(n).astype(np.float32)
        return QuantizedMatrix(kind=kind, codes=codes, scales=np.ones((n, 1), np.float32), group_size=-1, bias=bias)

    gate, up, down = matrix(20, 72), matrix(20, 72), matrix(72, 20)
    expert = Expert(gate if gated else None, up, down)
    found = round_trip(expert)
    for have, want in zip((found.gate, found.up, found.down), (expert.gate, up, down), strict=True):
        if want is not None:
            assert_same(have, want)
    w13, w2 = marlin.describe(expert, "none")
    spec = moe_spec(1, 72, 20, w13, w2, gated=int(gated))
    rows = [np.zeros(marlin.row_bytes(spec, p), np.uint8) for p in ("w13", "w2")]
    marlin.pack(expert, spec, *rows)
    stored = rows[0][marlin.row(spec, "w13").part("codes")].view(np.uint16).reshape(-1, 2, 16, 64)
    want = np.concatenate([gate.codes[:8], up.codes[:8]]) if gated else up.codes[:16]
    assert np.array_equal(stored[0, 0], want[:, :64])


def test_negative_scales_of_nvfp4_are_refused():
    m = random_matrix(np.random.default_rng(0), 16, 64, "nvfp4", 16, "e4m3")
    m.scales.view(np.uint8)[0, 0] |= 0x80
    spec = linear_spec(64, 16, marlin.describe_down(m, "none"))
    with pytest.raises(ValueError, match="nvfp4 scales are negative"):
        marlin.pack_down(m, spec.moe, np.empty(marlin.row_bytes(spec.moe, "w2"), np.uint8))
