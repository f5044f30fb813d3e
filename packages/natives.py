"""Lays out a library for ONNX Runtime, for each platform in SOURCE, as OUT/RID/library by .NET's names of platforms.

usage: natives.py quantmoe_ort|quantmoe_ort_cuda SOURCE OUT [RID...]: SOURCE is a folder of wheels, or of libraries as
`export` leaves them beside a model. Fails unless each RID is there, or where none is named, at least one.
"""

import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

#: a library: the target of make that puts it into a wheel
WHEELS = {"quantmoe_ort": "make wheel", "quantmoe_ort_cuda": "make wheel-cuda"}
#: .NET's name of a platform: how its libraries begin; ELF has the machine at byte 18
RIDS = {
    "linux-x64": rb"\x7fELF.{14}\x3e\0",
    "linux-arm64": rb"\x7fELF.{14}\xb7\0",
    "win-x64": rb"MZ",
    "osx-arm64": rb"\xcf\xfa\xed\xfe\x0c\0\0\x01",
}


def libraries(library: str, source: Path) -> Iterator[tuple[Path, str, bytes]]:
    """Yields the file, the library's name and its bytes."""
    for path in sorted(source.glob(f"*{library}.*")):
        yield path, path.name, path.read_bytes()
    for path in sorted(source.glob("*.whl")):
        with zipfile.ZipFile(path) as archive:
            (name,) = (n for n in archive.namelist() if PurePosixPath(n).match(f"ort_ext/*{library}.*"))
            yield path, PurePosixPath(name).name, archive.read(name)


def lay_out(library: str, source: Path, out: Path, wanted: list[str]) -> list[str]:
    """Fills OUT anew and returns the platforms in it.

    Raises:
        SystemExit: a wanted platform has no library, a platform has two, or a library is for another platform.
    """
    shutil.rmtree(out, ignore_errors=True)
    found: dict[str, Path] = {}
    for path, name, data in libraries(library, source):
        rid = next((rid for rid, begin in RIDS.items() if re.match(begin, data, re.DOTALL)), None)
        if rid is None:
            sys.exit(f"{path}: {name} is for none of {', '.join(RIDS)}")
        if rid in found:
            sys.exit(f"{source}: {found[rid].name} and {path.name} are both for {rid}")
        found[rid] = path
        (out / rid).mkdir(parents=True)
        (out / rid / name).write_bytes(data)
    missing = [rid for rid in wanted if rid not in found]
    if missing or not found:
        wanted = missing or list(RIDS)
        sys.exit(f"{source} has no {library} for {', '.join(wanted)}, and no wheel that has one: {WHEELS[library]}")
    return list(found)


if __name__ == "__main__":
    print("natives:", *lay_out(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
