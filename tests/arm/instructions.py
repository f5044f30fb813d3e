"""Instructions of a product a multiply-accumulate, ours beside KleidiAI's: `instructions.py DIR`, DIR from run.sh.

qemu logs what count.cc executes, so that loads of scales, zero points and spilled registers count as well as the loop
over a group; what 128 more columns take is divided by their multiply-accumulates. Beside it llvm-mca's cycles for the
same instructions, where it is installed: a simulation of a Neoverse N2 with all loads in the first cache. No speed is
claimed from this; it says that the loops do the same work. Fails above LIMITS.
"""

import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

#: 16 is the first that knows the core
MCA = next((found for version in range(22, 15, -1) if (found := shutil.which(f"llvm-mca-{version}"))), None)
#: what the formats that KleidiAI lacks are compared with; INT4 where none is named
INT4 = "int4, groups of 32"
PEERS = {
    "int4, groups of 128, zero points": "int4, groups of 128",
    "int4, groups of 32, float activations": "",
    "int4, groups of 32, zero points, float activations": f"{INT4}, float activations",
    "mxfp4, float activations": f"{INT4}, float activations",
    "nvfp4, float activations": f"{INT4}, float activations",
    "fp8_e4m3, groups of 128": f"{INT4}, float activations",
    "bf16": f"{INT4}, float activations",
    "f16": f"{INT4}, float activations",
}
#: ours to KleidiAI's, several rows of groups of 32 or more to their peer's
LIMITS = (1.15, 1.15)
SMALL = {"int4, groups of 16", "nvfp4", "nvfp4, nvfp4 activations"}

Key = tuple[str, str, int]
"""kernel, format, rows"""


def traces(folder: Path) -> dict[Key, tuple[int, list[int], list[int]]]:
    """Multiply-accumulates, then addresses executed with fewer and with more columns."""
    command = [folder / "host/usr/bin/qemu-aarch64", "-cpu", "neoverse-n2", "-one-insn-per-tb", "-d", "exec,nochain"]
    done = subprocess.Popen([*command, folder / "count"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.stdout
    assert done.stderr
    products: list[str] = []
    reader = threading.Thread(target=lambda out: products.extend(out), args=(done.stdout,))
    reader.start()
    pieces: list[list[int]] = [[]]
    for line in done.stderr:
        if line.endswith("] mark\n"):
            pieces.append([])
        elif len(pieces) % 2 == 0:  # between two marks
            pieces[-1].append(int(line.split("/", 2)[1], 16))
    reader.join()
    if done.wait():
        raise SystemExit(f"instructions.py: count ended with {done.returncode}")
    found = {}
    for product, less, more in zip(products, pieces[1::4], pieces[3::4], strict=True):
        kernel, what, rows, macs = product.split("|")
        found[kernel.removeprefix("panel_"), what, int(rows)] = int(macs), less, more
    return found


def cycles(program: Path, pieces: list[list[int]]) -> list[int]:
    """Of each piece; branches are left out: they are predicted."""
    command = ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", program]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code = {}
    for address, name, operands in re.findall(r"^\s*([0-9a-f]+):\s+(\S+)[ \t]*(.*)$", text, re.M):
        jumps = " <" in operands or name in ("ret", "br", "blr")
        code[int(address, 16)] = "" if jumps else f"{name} {operands.partition('//')[0]}\n"
    regions = (f"# LLVM-MCA-BEGIN\n{''.join(code[address] for address in piece)}# LLVM-MCA-END\n" for piece in pieces)
    command = [
        str(MCA),
        "-march=aarch64",
        "-mcpu=neoverse-n2",
        "-iterations=1",
        "-instruction-info=0",
        "-resource-pressure=0",
    ]
    done = subprocess.run(command, input="".join(regions), capture_output=True, text=True, check=True).stdout
    return [int(total) for total in re.findall(r"Total Cycles:\s+(\d+)", done)]


def main(folder: Path) -> int:
    found = traces(folder)
    instructions = {key: 1024 * (len(more) - len(less)) / macs for key, (macs, less, more) in found.items()}
    simulated: dict[Key, float] = {}
    if MCA:
        totals = cycles(folder / "count", [piece for _, *both in found.values() for piece in both])
        for (key, (macs, _, _)), less, more in zip(found.items(), totals[::2], totals[1::2], strict=True):
            simulated[key] = 1024 * (more - less) / macs

    def cell(key: Key) -> str:
        return f"{instructions[key]:7.1f} ({simulated[key]:5.1f})" if MCA else f"{instructions[key]:7.1f}"

    worst = [0.0, 0.0]
    print("instructions (llvm-mca's cycles on Neoverse N2) per 1024 multiply-accumulates, beside a peer's")
    for ours in found:
        kernel, what, rows = ours
        if kernel == "kleidiai":
            continue
        peer = "kleidiai", what, rows
        if peer not in found:
            peer = kernel, PEERS.get(what, INT4), rows
        elif kernel == "neon_dotprod" and rows > 1:  # KleidiAI's is i8mm
            peer = kernel, "", rows
        title = f"{what}, {rows} row{'s' * (rows > 1)}, {kernel}"
        if peer not in found:
            print(f"{title:68s}{cell(ours)}")
            continue
        ratio = instructions[ours] / instructions[peer]
        name = "KleidiAI" if peer[0] == "kleidiai" else peer[1]
        print(f"{title:68s}{cell(ours)}  {name:38s}{cell(peer)}  {ratio:.2f}")
        if peer[0] == "kleidiai":
            worst[0] = max(worst[0], ratio)
        elif rows > 1 and what not in SMALL:
            worst[1] = max(worst[1], ratio)
    print(f"worst ratios: {worst[0]:.2f} to KleidiAI, {worst[1]:.2f} to plain int4 in groups of 32 or more")
    return int(any(ratio > limit for ratio, limit in zip(worst, LIMITS, strict=True)))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
