"""Instructions of the hot loops a multiply-accumulate, ours against KleidiAI's: `instructions.py DIR`, DIR from run.sh.

Beside them llvm-mca's cycles, where it is installed: a simulation of the core with all loads in the first cache. No
speed is claimed from this; it says that the loops do the same work. Fails where ours takes more than 1.15 times as many
instructions.
"""

import re
import shutil
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


CORES = ("neoverse-n2", "neoverse-v2")
#: 16 is the first that knows both cores
MCA = next((found for version in range(22, 15, -1) if (found := shutil.which(f"llvm-mca-{version}"))), None)


def loops(obj: Path, function: str) -> list[list[float]]:
    """Of the innermost loops of functions named like ``function``: instructions, then cycles on each of CORES, per 1024
    multiply-accumulates."""
    text = subprocess.run(
        ["aarch64-linux-gnu-objdump", "-dC", "--no-show-raw-insn", obj], capture_output=True, text=True, check=True
    ).stdout
    found: list[list[float]] = []
    code: dict[int, tuple[str, str]] = {}
    wanted = False
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


def innermost(code: dict[int, tuple[str, str]]) -> list[list[float]]:
    backward = []
    for address, (name, operands) in code.items():
        target = re.search(r"\b([0-9a-f]+) <", operands)
        if name.startswith("b.") and target and int(target[1], 16) < address:
            backward.append((int(target[1], 16), address))
    found = []
    for first, last in backward:
        body = [instruction for address, instruction in code.items() if first <= address <= last]
        macs = sum(MACS.get(name, 0) for name, _ in body)
        if macs and not any(first <= a and b < last for a, b in backward):
            found.append([1024 * n / macs for n in (len(body), *(cycles(body, core) for core in CORES if MCA))])
    return found


def cycles(body: list[tuple[str, str]], core: str) -> float:
    """Of one iteration in the middle of many; the closing branch is predicted."""
    assert MCA is not None
    text = "".join(f"{name} {operands.partition('//')[0]}\n" for name, operands in body if " <" not in operands)
    command = [MCA, "-march=aarch64", f"-mcpu={core}", "-iterations=100"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    match = re.search(r"Total Cycles:\s+(\d+)", done)
    assert match is not None
    return int(match[1]) / 100


def main(folder: Path) -> int:
    library = folder / "arm64/usr/lib/aarch64-linux-gnu/libkleidiai.a"
    objects = folder / "cmake/custom_ops/CMakeFiles/quantmoe_core.dir/src/cpu"
    worst = 0.0
    heads = "".join(f"   {core} cycles" for core in CORES if MCA)
    print(f"per 1024 useful multiply-accumulates, KleidiAI/ours    instructions{heads}")
    with tempfile.TemporaryDirectory() as unpacked:
        subprocess.run(["aarch64-linux-gnu-ar", "x", "--output", unpacked, library], check=True)
        for what, (theirs, isa, units, bits, useful) in PAIRS.items():
            suffix = "S.o" if theirs.endswith("_asm") else "c.o"
            kleidi = min(loops(Path(unpacked) / f"kai_matmul_clamp_f32_{theirs}.{suffix}", "kai_"))
            ours = max(loops(objects / f"panel_neon_{isa}.cc.o", f"quantized_rows<{units}, {bits}>"))
            ours = [n / useful for n in ours]
            print(f"{what:52s}" + "".join(f"{a:12.1f}/{b:5.1f}" for a, b in zip(kleidi, ours, strict=True)))
            worst = max(worst, ours[0] / kleidi[0])
    print(f"worst ratio {worst:.2f}")
    return int(worst > 1.15)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
