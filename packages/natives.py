"""Lays out the libraries for ONNX Runtime of the wheels in DIST: OUT/RID/library, by .NET's names of platforms.

usage: natives.py DIST OUT [RID...]: fails unless each RID is there, or where none is named, one at least.
"""

import shutil
import sys
import zipfile
from pathlib import Path, PurePosixPath

#: .NET's name of a platform: how a wheel's file name begins and ends its own
RIDS = {
    "linux-x64": ("manylinux", "x86_64"),
    "linux-arm64": ("manylinux", "aarch64"),
    "win-x64": ("win", "amd64"),
    "osx-arm64": ("macosx", "arm64"),
}


def lay_out(dist: Path, out: Path, wanted: list[str]) -> list[str]:
    """Fills OUT anew and returns the platforms in it.

    Raises:
        SystemExit: a wanted platform has no wheel, or a platform has two.
    """
    shutil.rmtree(out, ignore_errors=True)
    found: dict[str, Path] = {}
    for wheel in sorted(dist.glob("*.whl")):
        tag = wheel.stem.split("-")[-1]
        for rid, (first, last) in RIDS.items():
            if not (tag.startswith(first) and tag.endswith(last)):
                continue
            if rid in found:
                sys.exit(f"{dist}: {found[rid].name} and {wheel.name} are both for {rid}")
            found[rid] = wheel
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (n for n in archive.namelist() if PurePosixPath(n).match("ort_ext/*quantmoe_ort.*"))
                (out / rid).mkdir(parents=True)
                (out / rid / PurePosixPath(name).name).write_bytes(archive.read(name))
    missing = [rid for rid in wanted if rid not in found]
    if missing or not found:
        sys.exit(f"{dist} has no wheel for {', '.join(missing or RIDS)}: make wheel")
    return list(found)


if __name__ == "__main__":
    print("natives:", *lay_out(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
