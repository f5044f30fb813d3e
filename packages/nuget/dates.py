"""Gives all entries of NuGet packages one date, so that the same files give the same bytes.

usage: dates.py SECONDS NUPKG...: SECONDS since 1970, the commit's. MSBuild copies a file only if its date or
size differs: with one date for ever, a library would stay after an update.
"""

import sys
import time
import zipfile
from pathlib import Path


def date(path: Path, seconds: int) -> None:
    """Write a package anew."""
    with zipfile.ZipFile(path) as package:
        parts = {name: package.read(name) for name in package.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as package:
        for name, data in parts.items():
            package.writestr(zipfile.ZipInfo(name, time.gmtime(seconds)[:6]), data, zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        date(Path(name), int(sys.argv[1]))
