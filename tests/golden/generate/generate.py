"""Writes tests/golden/*.npz: small matrices and activations, and what KleidiAI itself makes of them.

    generate.py COMMAND...

COMMAND runs kleidiai.cc built for aarch64; `tests/arm/run.sh golden` does both. These: KleidiAI 1.8.0, qemu 10.0.13.
Each file: group_size; codes uint8 [N, K]; scales (bf16 bits as uint16 [N, K / g], or f32 [N, 1]); bias f32 [N];
packed uint8, by KleidiAI's packer; x f32 [M, K]; q int8 [M, K], zero_point int32 [M], step f32 [M], by its quantizer;
y f32 [M, N], the same from its dotprod and i8mm kernels.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np

CASES = {  # name: bits, group_size, N (not a multiple of the panel), K (a multiple of 8: quant_moe.def, Activations)
    "int4_g32": (4, 32, 13, 96),
    "int4_g64": (4, 64, 11, 128),
    "int4_g128": (4, 128, 9, 256),
    "int4_channel": (4, -1, 13, 72),
    "int8_channel": (8, -1, 7, 72),
}


def generate(command: list[str], name: str, bits: int, group: int, n: int, k: int, rng: np.random.Generator) -> None:
    codes = rng.integers(0, 1 << bits, (n, k), np.uint8)
    if group > 0:
        magnitude = rng.integers(0x3A00, 0x4000, (n, k // group), np.uint16)
        scales = magnitude | rng.integers(0, 2, magnitude.shape, np.uint16) << 15
    else:
        scales = rng.normal(0, 0.01, (n, 1)).astype(np.float32)
    bias = rng.normal(size=n).astype(np.float32)
    x = rng.normal(size=(7, k)).astype(np.float32)
    x[1] = x[1, 0]
    x[2] = 0
    x[3] *= 1e-30
    x[4] *= 1e30
    x[5] = np.abs(x[5])
    x[6] = -127.5 + 0.5 * rng.integers(0, 511, k)  # scale 1: codes and zero point half way between integers
    x[6, :2] = -127.5, 127.5
    m = len(x)

    sizes = np.array([bits, group, n, k, m], np.int64)
    data = b"".join(a.tobytes() for a in (sizes, codes, scales, bias, x))
    out = subprocess.run(command, input=data, stdout=subprocess.PIPE, check=True).stdout
    size = int(np.frombuffer(out, np.int64, 1)[0])
    packed = np.frombuffer(out, np.uint8, size, 8)
    kp = -(-k // 32) * 32
    rows = np.frombuffer(out, np.uint8, m * (kp + 8), 8 + size).reshape(m, kp + 8)
    y = np.frombuffer(out, np.float32, 2 * m * n, 8 + size + rows.size).reshape(2, m, n)
    assert np.array_equal(y[0].view(np.int32), y[1].view(np.int32)), "dotprod and i8mm differ"
    np.savez_compressed(
        Path(__file__).parents[1] / f"{name}.npz",
        codes=codes,
        scales=scales,
        bias=bias,
        group_size=group,
        packed=packed,
        x=x,
        q=rows[:, :k].view(np.int8),
        zero_point=-rows[:, kp : kp + 4].copy().view(np.int32)[:, 0],
        step=rows[:, kp + 4 :].copy().view(np.float32)[:, 0],
        y=y[0],
    )


if __name__ == "__main__":
    rng = np.random.default_rng(20)
    for name, case in CASES.items():
        generate(sys.argv[1:], name, *case, rng)
