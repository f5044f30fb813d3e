"""Instructions of the hot loops a multiply-accumulate, ours against KleidiAI's: `instructions.py DIR`, DIR from run.sh.

No speed is claimed from this; it says that the loops do the same work. Fails where ours takes more than 1.15 times as
many.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

#: multiply-accumulates of one instruction
MACS = {"smmla": 32, "sdot": 16}
#: what we run: (KleidiAI's kernel on the same layout, our file, units of rows, bits, share of the MACs that is useful)
PAIRS = {
    "int4 groups, 4 rows": ("qai8dxp4x8_qsi4c32p8x8_4x8x32_neon_i8mm_asm", "i8mm", 2, 4, 1),
    "int4 groups, 8 rows": ("qai8dxp4x8_qsi4c32p8x8_4x8x32_neon_i8mm_asm", "i8mm", 4, 4, 1),
    "int4 channelwise, 8 rows": ("qai8dxp4x8_qsi4cxp8x8_8x8x32_neon_i8mm", "i8mm", 4, 4, 1),
    "int8 channelwise, 8 rows": ("qai8dxp4x8_qsi8cxp4x8_16x4_neon_i8mm", "i8mm", 4, 8, 1),
    "int4 groups, 1 row, dotprod": ("qai8dxp1x8_qsi4c32p8x8_1x8x32_neon_dotprod_asm", "dotprod", 1, 4, 1),
    "int4 groups, 1 row, i8mm": ("qai8dxp1x8_qsi4c32p8x8_1x8x32_neon_dotprod_asm", "i8mm", 1, 4, 0.5),
    "int8 channelwise, 1 row, dotprod": ("qai8dxp1x8_qsi8cxp4x8_1x4_neon_dotprod", "dotprod", 1, 8, 1),
    "int8 channelwise, 1 row, i8mm": ("qai8dxp1x8_qsi8cxp4x8_1x4_neon_dotprod", "i8mm", 1, 8, 0.5),
}


def loops(obj: Path, function: str) -> list[float]:
    """Instructions per 1024 multiply-accumulates of the innermost loops of functions named like ``function``."""
    text = subprocess.run(
        ["aarch64-linux-gnu-objdump", "-dC", "--no-show-raw-insn", obj], capture_output=True, text=True, check=True
    ).stdout
    found, code, wanted = [], {}, False
    for line in [*text.splitlines(), "0 <end>:"]:
        if header := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            if header[1].startswith("label"):  # hand-written assembly: one function
                continue
            if wanted:
                found += innermost(code)
            code, wanted = {}, function in header[1]
        elif instruction := re.match(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*)$", line):
            code[int(instruction[1], 16)] = instruction[2], instruction[3]
    return found


def innermost(code: dict[int, tuple[str, str]]) -> list[float]:
    backward = []
    for address, (name, operands) in code.items():
        target = re.search(r"\b([0-9a-f]+) <", operands)
        if name.startswith("b.") and target and int(target[1], 16) < address:
            backward.append((int(target[1], 16), address))
    found = []
    for first, last in backward:
        body = [name for address, (name, _) in code.items() if first <= address <= last]
        macs = sum(MACS.get(name, 0) for name in body)
        if macs and not any(first <= a and b < last for a, b in backward):
            found.append(1024 * len(body) / macs)
    return found


def main(folder: Path) -> int:
    library = folder / "arm64/usr/lib/aarch64-linux-gnu/libkleidiai.a"
    objects = folder / "cmake/custom_ops/CMakeFiles/quantmoe_core.dir/src/cpu"
    worst = 0.0
    print("instructions per 1024 useful multiply-accumulates      KleidiAI   ours")
    with tempfile.TemporaryDirectory() as unpacked:
        subprocess.run(["aarch64-linux-gnu-ar", "x", "--output", unpacked, library], check=True)
        for what, (theirs, isa, units, bits, useful) in PAIRS.items():
            suffix = "S.o" if theirs.endswith("_asm") else "c.o"
            kleidi = min(loops(Path(unpacked) / f"kai_matmul_clamp_f32_{theirs}.{suffix}", "kai_"))
            ours = max(loops(objects / f"panel_neon_{isa}.cc.o", f"quantized_rows<{units}, {bits}>")) / useful
            print(f"{what:52s} {kleidi:10.1f} {ours:6.1f}")
            worst = max(worst, ours / kleidi)
    print(f"worst ratio {worst:.2f}")
    return int(worst > 1.15)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
