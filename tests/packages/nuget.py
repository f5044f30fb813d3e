"""NuGet's packages in dist, in projects that have nothing else: `make test-packages` calls this where dotnet stands."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUGET = ROOT / "packages/nuget"
pytestmark = pytest.mark.skipif(not shutil.which("dotnet"), reason="needs dotnet")


def dotnet(*arguments: str | Path, **more: str) -> str:
    command = ["dotnet", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=os.environ | more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_projects_of_one_program() -> None:
    """A library and its ASP.NET program both have the package, and the library shows the program its internal names."""
    model = os.environ["QUANTMOE_MODEL"]
    said = dotnet("run", "--artifacts-path", ROOT / "build/nuget/consumer", "--project", NUGET / "consumer", model)
    assert "session: input_ids" in said


@pytest.mark.parametrize("platform", ["linux-musl-x64", "win-arm64"])
def test_a_platform_without_a_library_is_a_warning(platform: str) -> None:
    project, artifacts = NUGET / "consumer/Library", ROOT / "build/nuget/platform"
    build: list[str | Path] = ["build", "--artifacts-path", artifacts, project]
    assert "QUANTMOE001" not in dotnet(*build)
    assert re.search(
        f"warning QUANTMOE001: The package QuantMoe has no library for {platform}: ",
        dotnet(*build, "--no-incremental", f"-p:RuntimeIdentifier={platform}", "-p:SelfContained=false"),
    )


@pytest.mark.parametrize("standard", ["false", "true"])
def test_xunit(standard: str) -> None:
    """The tests of packages/nuget/tests, also with the assemblies for .NET Standard."""
    artifacts = ROOT / f"build/nuget/tests-{standard}"
    said = dotnet("test", "--artifacts-path", artifacts, f"-p:Standard={standard}", NUGET / "tests")
    assert re.search("Failed: +0, Passed: +[0-9]{2}, Skipped: +0", said)


def test_dates(tmp_path: Path) -> None:
    """The library of a later commit is a later file, which MSBuild copies; the same commit gives the same bytes."""
    package = shutil.copy(next((ROOT / "dist").glob("QuantMoe.[0-9]*.nupkg")), tmp_path)
    found: dict[tuple[int, ...], set[bytes]] = {}
    for seconds in (1790000000, 1790086400, 1790000000):
        subprocess.run([sys.executable, NUGET / "dates.py", str(seconds), package], check=True)
        with zipfile.ZipFile(package) as archive:
            dates = {entry.date_time for entry in archive.infolist()}
        assert len(dates) == 1
        found.setdefault(min(dates), set()).add(Path(package).read_bytes())
    assert [date[:3] for date in sorted(found)] == [(2026, 9, 21), (2026, 9, 22)]
    assert all(len(same) == 1 for same in found.values())
