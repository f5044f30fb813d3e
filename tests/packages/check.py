"""What is in the packages of build/java: `make test-packages` calls this, as `make test` makes no packages."""

import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
NATIVES = {f"{p.parent.name}/{p.name}": p.read_bytes() for p in (ROOT / "build/natives").glob("*/*")}
LICENSE = (ROOT / "LICENSE").read_bytes()


@pytest.fixture
def jar():
    with zipfile.ZipFile(ROOT / f"build/java/quantmoe-{VERSION}.jar") as archive:
        yield archive


def test_natives():
    assert NATIVES
    for name, data in NATIVES.items():
        magic = {"linux": b"\x7fELF", "win": b"MZ", "osx": b"\xcf\xfa\xed\xfe"}[name.split("-")[0]]
        assert data.startswith(magic), name
        assert b"RegisterCustomOps" in data, name


def test_jar(jar):
    found = {
        n.removeprefix("quantmoe/native/"): jar.read(n) for n in jar.namelist() if "/native/" in n and n[-1] != "/"
    }
    assert found == NATIVES
    assert jar.read("META-INF/LICENSE") == LICENSE
    assert f"Implementation-Version: {VERSION}".encode() in jar.read("META-INF/MANIFEST.MF")
    for kind in ("sources", "javadoc"):
        with zipfile.ZipFile(ROOT / f"build/java/quantmoe-{VERSION}-{kind}.jar") as archive:
            assert any("QuantMoE" in name for name in archive.namelist())
