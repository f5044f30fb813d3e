"""Writes DIST/quantmoe-VERSION.cdx.json: a software bill of materials of a release, as CycloneDX 1.6.

usage: sbom.py DIST JAVA: DIST has wheels, sdist, nupkg and the folder cuda; JAVA has the jars.

It lists the files with their SHA-256, what is linked into the libraries (THIRD_PARTY_NOTICES.txt has the licences'
texts), the crates in the text library where `make text-library` has built it, and the Python packages that the wheel
and its extras bring, in the versions of packages/locked/main.txt, which has the hashes of their files.
"""

import hashlib
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
RELEASED = ("*.whl", "*.tar.gz", "*.nupkg", "cuda/*.whl")


class Package:
    """A package in a file of packages/locked/: its version, and who asks for it."""

    def __init__(self, name: str, version: str):
        self.name, self.version = name, version
        self.wanted_by: list[str] = []

    @property
    def ref(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def locked(name: str) -> list[Package]:
    """Reads packages/locked/NAME.txt; a package may have a version for each Python."""
    packages: list[Package] = []
    for line in (ROOT / "packages" / "locked" / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"([a-z0-9-]+)==([^ ]+)", line):
            packages.append(Package(found[1], found[2]))
        elif packages and (found := re.match(r" +#(?: via)? +([^ ].*)", line)):
            packages[-1].wanted_by.append(found[1])
    return packages


def brought() -> list[Package]:
    """The packages that quantmoe and its extras bring, those that these bring included."""
    packages = locked("main")
    names = {"quantmoe (pyproject.toml)"}
    while more := {p.name for p in packages if names & set(p.wanted_by)} - names:
        names |= more
    return [p for p in packages if p.name in names]


def linked() -> list[dict[str, Any]]:
    """What the libraries contain of others."""
    versions = {p.name: p.version for p in locked("main") + locked("cuda")}
    headers = (ROOT / "ort_ext" / "onnxruntime_headers.sh").read_text(encoding="utf-8")
    onnxruntime = re.search(r"version=([0-9.]+)", headers)
    assert onnxruntime
    every = "every platform"
    rows = [  # name, version, licence, in the libraries of, purl
        ("ONNX Runtime headers", onnxruntime[1], "MIT", every, "pkg:github/microsoft/onnxruntime"),
        ("zig: libc++, libc++abi, libunwind, compiler runtime, mingw-w64 runtime", versions["ziglang"],
         "Apache-2.0 WITH LLVM-exception AND MIT AND ZPL-2.1", "Linux x86-64, Windows, macOS", "pkg:pypi/ziglang"),
        ("KleidiAI", "", "Apache-2.0", "Linux aarch64", "pkg:github/ARM-software/kleidiai"),
        ("libstdc++ and libgcc", "", "GPL-3.0-or-later WITH GCC-exception-3.1",
         "Linux aarch64, quantmoe-cuda for Linux", ""),
        ("CUDA runtime", versions["nvidia-cuda-runtime"], "LicenseRef-NVIDIA-CUDA", "quantmoe-cuda for Linux",
         "pkg:pypi/nvidia-cuda-runtime"),
        ("TensorRT headers", "", "Apache-2.0", "quantmoe-cuda for Linux", "pkg:github/NVIDIA/TensorRT"),
    ]  # fmt: skip
    return [
        {"type": "library", "bom-ref": f"linked:{name}", "name": name, "licenses": [{"expression": licence}]}
        | {"properties": [{"name": "quantmoe:linked-into", "value": where}]}
        | ({"version": version} if version else {})
        | ({"purl": f"{purl}@{version}" if version else purl} if purl else {})
        for name, version, licence, where, purl in rows
    ]


def crates() -> list[dict[str, Any]]:
    """The crates that the text library contains: its notices name them, and Cargo.lock has their hashes."""
    notices = ROOT / "build/rust/THIRD_PARTY_NOTICES_TEXT.txt"
    if not notices.exists():
        return []
    lock = tomllib.loads((ROOT / "packages/rust/Cargo.lock").read_text(encoding="utf-8"))["package"]
    hashes = {(crate["name"], crate["version"]): crate["checksum"] for crate in lock if "checksum" in crate}
    rows = re.findall(r"^(\S+) (\S+)\. (.+)\. Texts: ", notices.read_text(encoding="utf-8"), re.MULTILINE)
    return [
        {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        | {"licenses": [{"expression": re.sub(" ?/ ?", " OR ", licence)}]}
        | {"hashes": [{"alg": "SHA-256", "content": hashes[name, version]}]}
        | {"properties": [{"name": "quantmoe:linked-into", "value": "the text library"}]}
        for name, version, licence in rows
        for purl in [f"pkg:cargo/{name}@{version}"]
    ]


def bill(dist: Path, java: Path) -> dict[str, Any]:
    """The whole document."""
    files = sorted(path for pattern in RELEASED for path in dist.glob(pattern)) + sorted(java.glob("*.jar"))
    packages = brought()
    product = f"pkg:generic/quantmoe@{VERSION}"
    graph = {product: [p.ref for p in packages if "quantmoe (pyproject.toml)" in p.wanted_by]}
    for package in packages:
        graph[package.ref] = [p.ref for p in packages if package.name in p.wanted_by]
    contained = linked() + crates()
    graph[product] += [component["bom-ref"] for component in contained]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {"type": "library", "bom-ref": product, "name": "quantmoe", "version": VERSION}
            | {"licenses": [{"expression": "Apache-2.0"}], "purl": product}
        },
        "components": [
            {"type": "file", "bom-ref": f"file:{path.name}", "name": path.name}
            | {"hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}]}
            for path in files
        ]
        + contained
        + [
            {"type": "library", "bom-ref": p.ref, "name": p.name, "version": p.version, "purl": p.ref} for p in packages
        ],
        "dependencies": [{"ref": ref, "dependsOn": needs} for ref, needs in graph.items()],
    }


if __name__ == "__main__":
    out = Path(sys.argv[1]) / f"quantmoe-{VERSION}.cdx.json"
    out.write_text(json.dumps(bill(Path(sys.argv[1]), Path(sys.argv[2])), indent=1) + "\n", encoding="utf-8")
    print(out)
