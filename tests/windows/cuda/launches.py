"""Compare what the driver got from Windows' library with what it got from Linux', except structs' padding.

usage: launches.py FOLDER LINUX WINDOWS: of the layouts of the structs on Windows; the two programs' outputs.
"""

import math
import re
import subprocess
import sys
from pathlib import Path

#: bytes of a field
SIZES = {"char": 1, "_Bool": 1, "bool": 1, "short": 2, "int": 4, "float": 4, "long long": 8, "double": 8}


def size_of(kind: str) -> int | None:
    """Return the bytes of a field of this type, None for a struct, whose own fields are in the layout."""
    one, *lengths = kind.replace("]", "").split("[")
    one = re.sub(r"\b(const|volatile|unsigned|signed) ", "", one).strip()
    each = 8 if one.endswith("*") else 4 if one.startswith("enum ") else SIZES.get(one)
    return each and math.prod(map(int, lengths), start=each)


def layouts(folder: Path) -> dict[str, bytearray]:
    """Return the structs: 1 for each byte that a field has, 0 for padding."""
    found = {}
    for path in folder.rglob("*.layouts"):
        for dump in path.read_text(encoding="utf-8").split("*** Dumping AST Record Layout\n")[1:]:
            lines = dump.splitlines()
            name = re.sub(r"\b(struct|class) ", "", lines[0].partition("| ")[2])
            if not (size := re.search(r"\[sizeof=(\d+)", dump)) or not name.startswith("quantmoe::"):
                continue
            used = bytearray(int(size[1]))
            for line in lines[1:]:
                if field := re.match(r" *(\d+) \|  +(.+?)(?: (\w+))?$", line):
                    at, bytes_ = int(field[1]), size_of(field[2])
                    if bytes_:
                        used[at : at + bytes_] = b"\1" * bytes_
            found[name] = used
    return found


def launches(output: Path, structs: dict[str, bytearray]) -> list[str]:
    """Return the program's lines. A launch is one line, with ".." for padding in its parameters."""
    lines = output.read_text(encoding="utf-8").replace("\r", "").replace("\n  ", " ").splitlines()
    said = subprocess.run(["c++filt"], check=True, capture_output=True, text=True, input="\n".join(lines)).stdout
    found = []
    for line in said.splitlines():
        if kernel := re.match(r"(.*\((.*)\), grid .* parameters )([0-9a-f]+)$", line):
            used, given = structs[kernel[2]], bytes.fromhex(kernel[3])
            if len(used) != len(given):
                sys.exit(f"{kernel[2]} has {len(used)} bytes on Windows, the kernel's code has {len(given)}")
            line = kernel[1] + "".join(f"{b:02x}" if u else ".." for b, u in zip(given, used, strict=True))
        found.append(line)
    return found


if __name__ == "__main__":
    structs = layouts(Path(sys.argv[1]))
    linux, windows = (launches(Path(path), structs) for path in sys.argv[2:])
    for a, b in zip(linux, windows, strict=True):
        if a != b:
            sys.exit(f"Linux:   {a}\nWindows: {b}")
    kernels = {line.split(", grid ")[0] for line in windows if ", grid " in line}
    print(f"{len(kernels)} kernels are launched as on Linux, in {len(windows)} calls of the driver")
