"""What the dylibs in macOS's wheel are, as far as can be said without macOS: `make test-macos` calls this."""

import subprocess
import zipfile
from pathlib import Path

import lief
import pytest

ROOT = Path(__file__).resolve().parents[2]
#: operator new and delete, which zig's linker does not hide: they are weak, and all definitions end in malloc and free
ALLOCATION = ("__Zn", "__Zd")
IMAGE = {"__mh_dylib_header", "___dso_handle"}


@pytest.fixture(scope="module")
def wheel():
    (path,) = (ROOT / "dist").glob("*-macosx_13_0_arm64.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.mark.parametrize("name", ["custom_ops/libquantmoe", "ort_ext/libquantmoe_ort"])
def test_dylib(wheel, name):
    library = lief.parse(list(wheel.read(f"quantmoe/{name}.dylib")))
    assert library.header.cpu_type == lief.MachO.Header.CPU_TYPE.ARM64
    assert library.header.file_type == lief.MachO.Header.FILE_TYPE.DYLIB
    assert library.build_version.platform == lief.MachO.BuildVersion.PLATFORMS.MACOS
    assert tuple(library.build_version.minos) == (13, 0, 0)
    assert library.has_code_signature  # arm64 starts nothing without one
    own, *needed = [entry.name for entry in library.libraries]
    assert own == f"@rpath/{Path(name).name}.dylib"
    assert needed == ["/usr/lib/libSystem.B.dylib"]

    exported = {symbol.name for symbol in library.exported_symbols if not symbol.name.startswith(ALLOCATION)} - IMAGE
    wanted = linux_symbols(name)
    if name == "ort_ext/libquantmoe_ort":  # the C interface, too: macOS binds names library by library
        wanted |= {symbol for symbol in linux_symbols("custom_ops/libquantmoe") if not symbol.startswith("_qm_cuda_")}
    assert exported == wanted


def linux_symbols(name: str) -> set[str]:
    listing = subprocess.check_output(["nm", "-D", "--defined-only", ROOT / f"{name}.so"], text=True)
    return {"_" + line.split()[2].split("@")[0] for line in listing.splitlines()}
