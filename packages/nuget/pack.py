"""Writes OUT/QuantMoe.VERSION.nupkg of NATIVES and the files beside this one, without .NET.

usage: pack.py NATIVES OUT
"""

import sys
import tomllib
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
CONTENT_TYPES = """<?xml version="1.0" encoding="utf-8"?>
<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">
  <Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml" />
  {}
  <Override PartName="/LICENSE" ContentType="application/octet" />
</Types>
"""
RELATIONSHIPS = """<?xml version="1.0" encoding="utf-8"?>
<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">
  <Relationship Type="http://schemas.microsoft.com/packaging/2010/07/manifest"
    Target="/QuantMoe.nuspec" Id="manifest" />
</Relationships>
"""


def pack(natives: Path, out: Path) -> Path:
    """Writes the package and returns its path; the same bytes from the same files."""
    parts = {
        "QuantMoe.nuspec": (HERE / "QuantMoe.nuspec").read_bytes().replace(b"$version$", VERSION.encode()),
        "README.md": (HERE / "README.md").read_bytes(),
        "LICENSE": (ROOT / "LICENSE").read_bytes(),
        "THIRD_PARTY_NOTICES.txt": (ROOT / "THIRD_PARTY_NOTICES.txt").read_bytes(),
        "contentFiles/cs/netstandard2.0/QuantMoe.cs": (HERE / "QuantMoe.cs").read_bytes(),
    }
    for library in sorted(natives.glob("*/*")):
        parts[f"runtimes/{library.parent.name}/native/{library.name}"] = library.read_bytes()
    suffixes = sorted({Path(name).suffix[1:] for name in parts} - {""})
    defaults = "\n  ".join(f'<Default Extension="{suffix}" ContentType="application/octet" />' for suffix in suffixes)
    parts = {
        "[Content_Types].xml": CONTENT_TYPES.format(defaults).encode(),
        "_rels/.rels": RELATIONSHIPS.encode(),
    } | parts
    out.mkdir(exist_ok=True)
    path = out / f"QuantMoe.{VERSION}.nupkg"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as package:
        for name, data in parts.items():
            package.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return path


if __name__ == "__main__":
    print(pack(Path(sys.argv[1]), Path(sys.argv[2])))
