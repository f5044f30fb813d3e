"""Files of packages that the tests fetch as they run; none is in the repository. They stay in build/real."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

BUILD = Path(__file__).parents[2] / "build/real"
#: sources of llama.cpp
LLAMA_CPP = "llama-cpp-python", "0.3.36", "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"


def npm(package: str, version: str, integrity: str) -> Path:
    """Return a package's folder.

    Args:
        integrity: as package-lock.json has it: ``sha512-`` and the digest in base64.

    Raises:
        AssertionError: the package is another.
    """
    folder = BUILD / "npm"
    archive = folder / f"{package.removeprefix('@').replace('/', '-')}-{version}.tgz"
    if not archive.exists():
        folder.mkdir(parents=True, exist_ok=True)
        assert shutil.which("npm"), f"no npm here, which fetches {package} {version}; or put {archive} there yourself"
        subprocess.run(["npm", "pack", "--silent", f"{package}@{version}"], cwd=folder, check=True, stdout=sys.stderr)
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    assert f"sha512-{digest}" == integrity, f"{archive} is not {package} {version}"
    return _unpacked(archive) / "package"


def llama_cpp() -> Path:
    """Return the folder of llama.cpp's sources in the source package of llama-cpp-python.

    Raises:
        AssertionError: the package is another.
    """
    name, version, digest = LLAMA_CPP
    folder = BUILD / "pypi"
    archive = folder / f"{name.replace('-', '_')}-{version}.tar.gz"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run(
            [*command, "--no-binary", ":all:", "--dest", folder, f"{name}=={version}"], check=True, stdout=sys.stderr
        )
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == digest, f"{archive} is not {name} {version}"
    return _unpacked(archive) / f"{name.replace('-', '_')}-{version}/vendor/llama.cpp"


def _unpacked(archive: Path) -> Path:
    folder = archive.with_name(archive.name + ".d")
    if not folder.exists():
        partial = folder.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        with tarfile.open(archive) as tar:
            tar.extractall(partial, filter="data")
        partial.rename(folder)
    return folder
