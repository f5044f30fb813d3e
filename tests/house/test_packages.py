"""packages/natives.py, and what `make jar` and `make nupkg` need; `make test-packages` looks into the packages."""

from __future__ import annotations

import io
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from quantmoe.ort_ext import library_path

ROOT = Path(__file__).parents[2]
ELF = b"\x7fELF" + bytes(14)
#: platform -> its library's name and first bytes
LIBRARIES = {
    "linux-x64": ("libquantmoe_ort.so", ELF + b"\x3e\0"),
    "linux-arm64": ("libquantmoe_ort.so", ELF + b"\xb7\0"),
    "win-x64": ("quantmoe_ort.dll", b"MZ"),
    "osx-arm64": ("libquantmoe_ort.dylib", b"\xcf\xfa\xed\xfe\x0c\0\0\x01"),
}


def natives(source: Path, out: Path, *wanted: str, library: str = "quantmoe_ort") -> str:
    """Run the script and return what it says."""
    command = [sys.executable, ROOT / "packages/natives.py", library, source, out, *wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else f"{done.returncode}: {done.stderr.strip()}"


def wheel(folder: Path, rid: str) -> None:
    name, data = LIBRARIES[rid]
    with zipfile.ZipFile(folder / f"quantmoe-0-py3-none-{rid.replace('-', '_')}.whl", "w") as archive:
        archive.writestr("quantmoe/ort_ext/__init__.py", "")
        archive.writestr(f"quantmoe/ort_ext/{name}", data)
        archive.writestr("quantmoe/custom_ops/libquantmoe.so", b"")


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_natives_of_an_exported_folder(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    (tmp_path / "libquantmoe_ort_cuda.so").write_bytes(LIBRARIES["linux-x64"][1])
    shutil.copy(library_path(), tmp_path / "libquantmoe_ort.so")
    rid = "linux-arm64" if os.uname().machine == "aarch64" else "linux-x64"
    assert natives(tmp_path, tmp_path / "out") == f"natives: {rid}"
    (found,) = (path for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert found == tmp_path / "out" / rid / "libquantmoe_ort.so"
    assert found.read_bytes() == Path(library_path()).read_bytes()
    assert natives(tmp_path, tmp_path / "cuda", library="quantmoe_ort_cuda") == "natives: linux-x64"
    assert [path.name for path in (tmp_path / "cuda/linux-x64").iterdir()] == ["libquantmoe_ort_cuda.so"]


def test_natives_of_wheels(tmp_path: Path) -> None:
    for rid in LIBRARIES:
        wheel(tmp_path, rid)
    assert natives(tmp_path, tmp_path / "out", *LIBRARIES) == "natives: linux-arm64 linux-x64 osx-arm64 win-x64"
    found = {p.relative_to(tmp_path / "out"): p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found == {Path(rid, name): data for rid, (name, data) in LIBRARIES.items()}


def test_natives_are_refused(tmp_path: Path) -> None:
    every = "linux-x64, linux-arm64, win-x64, osx-arm64"
    said = natives(tmp_path, tmp_path / "out")
    assert said == f"1: {tmp_path} has no quantmoe_ort for {every}, and no wheel that has one: make wheel"
    wheel(tmp_path, "linux-x64")
    assert "has no quantmoe_ort for win-x64," in natives(tmp_path, tmp_path / "out", "linux-x64", "win-x64")
    (tmp_path / "libquantmoe_ort.so").write_bytes(LIBRARIES["linux-x64"][1])
    assert natives(tmp_path, tmp_path / "out").endswith("are both for linux-x64")
    (tmp_path / "libquantmoe_ort.so").write_bytes(ELF + b"\x16\0")
    assert "libquantmoe_ort.so: libquantmoe_ort.so is for none of linux-x64," in natives(tmp_path, tmp_path / "out")


def test_android_library(tmp_path: Path) -> None:
    """An AAR has the jar's classes without its libraries, the library for aarch64 alone, and the date of the jar."""
    jar, jni, out = tmp_path / "a.jar", tmp_path / "jni", tmp_path / "a.aar"
    with zipfile.ZipFile(jar, "w") as archive:
        for name in (
            "META-INF/LICENSE",
            "META-INF/THIRD_PARTY_NOTICES.txt",
            "quantmoe/Chat.class",
            "quantmoe/native/x/y.so",
        ):
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6)), name)

    def pack() -> str:
        command = [sys.executable, ROOT / "packages/android/aar.py", jar, jni, out]
        return subprocess.run(command, capture_output=True, text=True).stderr.strip()

    library = jni / "arm64-v8a/libquantmoe_ort.so"
    library.parent.mkdir(parents=True)
    assert pack() == f"{library.parent} has no libquantmoe_ort.so"
    library.write_bytes(LIBRARIES["linux-x64"][1])
    assert pack() == f"{library}: expected an ELF file for aarch64"
    library.write_bytes(LIBRARIES["linux-arm64"][1])
    assert pack() == ""
    with zipfile.ZipFile(out) as aar:
        assert {entry.date_time for entry in aar.infolist()} == {(2026, 1, 2, 3, 4, 6)}
        parts = {name: aar.read(name) for name in aar.namelist()}
    assert b'package="io.github.quantmoe"' in parts.pop("AndroidManifest.xml")
    with zipfile.ZipFile(io.BytesIO(parts.pop("classes.jar"))) as found:
        assert [n for n in found.namelist() if not n.startswith("META-INF")] == ["quantmoe/Chat.class"]
    assert parts.pop("jni/arm64-v8a/libquantmoe_ort.so") == library.read_bytes()
    assert set(parts) == {"R.txt", "LICENSE", "THIRD_PARTY_NOTICES.txt"}


def commands(*arguments: str) -> str:
    """What make would run in an environment that is not there yet."""
    command = ["make", "--dry-run", "-C", str(ROOT), "VENV=build/nowhere", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_packages_need_no_pytorch(tmp_path: Path) -> None:
    assert "--extra demo" in commands("build")
    said = commands("jar", "nupkg", "NATIVES_CUDA=")  # whatever dist/cuda has
    assert "packages/natives.py" in said
    assert "dotnet pack" in said
    assert "--extra" not in said
    assert "QuantMoe.Cuda" not in said
    said = commands("jar", "nupkg", f"NATIVES={tmp_path}", f"NATIVES_CUDA={tmp_path}")
    assert "uv" not in said
    assert "for project in QuantMoe QuantMoe.Extensions.AI QuantMoe.Cuda;" in said
    assert f"packages/natives.py quantmoe_ort_cuda {tmp_path} build/natives-cuda" in said


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_packages_get_the_library_of_these_sources(tmp_path: Path) -> None:
    """A wheel of an earlier day in dist is made anew; wheels for other platforms and NuGet's packages stay."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "packages" / "locked", tmp_path / "packages" / "locked")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    dist = tmp_path / "dist"
    (dist / "cuda").mkdir(parents=True)
    own, others = (
        f"quantmoe-0-py3-none-manylinux_2_28_{platform.machine()}.whl",
        {"quantmoe-0-win.whl", "a.nupkg", "cuda"},
    )
    for name in (own, *others - {"cuda"}):
        (dist / name).touch()
    said = subprocess.run(["make", "-n", "-C", tmp_path, "jar"], capture_output=True, text=True, check=True).stdout
    assert "uv build --quiet --wheel" in said
    (removed,) = re.findall(r"^rm .* dist/.*$", said, re.M)
    subprocess.run(["sh", "-c", removed], cwd=tmp_path, check=True)
    assert {path.name for path in dist.iterdir()} == others
