"""What `make build` and `pip install` make: the library, the package as editors see it; what the Makefile decides."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.harness.elf import check_segments

from quantmoe.custom_ops import native
from quantmoe.exporter.targets import TARGETS
from quantmoe.exporter.writing import convert
from quantmoe.ort_ext import OLDEST_GLIBC, build_info, glibc_of, library_path

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
LOCKED = (ROOT / "packages/locked/main.txt").read_text(encoding="utf-8")


def newest_symbol(library: str) -> tuple[int, int]:
    with open(library, "rb") as file:
        needs = ELFFile(file).get_section_by_name(".gnu.version_r").iter_versions()
        names = [aux.name for _, wanted in needs for aux in wanted if aux.name.startswith("GLIBC_2")]
    return max(tuple(int(n) for n in name[6:].split("."))[:2] for name in names)


def test_glibc() -> None:
    """What `export` copies: it loads on glibc 2.28, unless CXX chose a compiler that links this machine's."""
    assert glibc_of(library_path()) == newest_symbol(library_path())
    if "CXX" not in os.environ:
        assert newest_symbol(library_path()) <= OLDEST_GLIBC


@pytest.mark.parametrize("path", [lambda: native.library()._name, library_path], ids=["quantmoe", "quantmoe_ort"])
def test_segments(path: Callable[[], str]) -> None:
    check_segments(Path(path()).read_bytes())


def test_glibc_remark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that asks for a newer glibc than is promised: `export` says so."""
    newer = tmp_path / Path(library_path()).name
    newer.write_bytes(Path(library_path()).read_bytes() + b"\0GLIBC_2.99\0")
    monkeypatch.setenv("QUANTMOE_ORT_LIBRARY", str(newer))
    (tmp_path / "model").mkdir()
    assert "asks for glibc 2.99" in convert._library(lambda name: tmp_path / "model" / name, TARGETS["cpu"], True)
    assert (tmp_path / "model" / newer.name).read_bytes() == newer.read_bytes()
    monkeypatch.setenv("QUANTMOE_ORT_CUDA_LIBRARY", str(newer))
    remark = convert._library(lambda name: tmp_path / "model" / name, TARGETS["cuda"], True)
    assert remark.endswith("asks for glibc 2.99 or newer (`make cuda` on an older system makes one for that system)")


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="reads Linux's list of processor features")
def test_build_info() -> None:
    """The compiler is one that this library can have, the kernel the best by the system's own list of features."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\nflags")[-1].split("\n")[0].split()
    wanted = {
        "panel_amxint8": {
            "avx512f",
            "avx512bw",
            "avx512vl",
            "avx512dq",
            "avx512_vnni",
            "fma",
            "f16c",
            "amx_tile",
            "amx_int8",
        },
        "panel_avx512vnni": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma", "f16c"},
        "panel_avx2": {"avx2", "fma", "f16c"},
        "panel_portable": set(),
    }
    for name, usable in native.kernels().items():
        if "neon" in name or "kleidiai" in name:
            continue
        assert name in wanted, f"{name}: the features that it needs, as /proc/cpuinfo calls them, are not in this table"
        assert usable == wanted[name].issubset(flags), name
    compiler, _, kernel = build_info().partition(", ")
    assert compiler.split()[0] in ("clang", "gcc")
    if "QUANTMOE_FORCE_KERNEL" not in os.environ:
        assert kernel == next(name for name, usable in native.kernels().items() if usable)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("quantmoe.exporter.writing.convert", "exporter/writing/convert.py"),
        ("quantmoe.runtime.generate", "ort_ext/runtime/generate.py"),
        ("quantmoe.benchmarks.bench", "ort_ext/benchmarks/bench.py"),
    ],
)
def test_paths_alone(name: str, file: str) -> None:
    """Folders and .pth files lead to every module: editors and type checkers follow these and run no import hooks."""
    paths, parts = sys.path, name.split(".")
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), paths)
        assert spec, parts[:count]
        paths = spec.submodule_search_locations
    assert Path(spec.origin).samefile(ROOT / file)


def test_folders_of_ort_ext_have_one_import_name(tmp_path: Path) -> None:
    """A second name would load a module twice, with classes of its own."""
    twice = re.compile(
        r"quantmoe[./]ort_ext[./](runtime|benchmarks)|quantmoe\.ort_ext import .*\b(runtime|benchmarks)\b"
    )
    for folder in ("exporter", "custom_ops", "ort_ext", "trt_plugins", "tests", "samples", "docs", "packages"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".md", ".sh") and file != Path(__file__):
                assert not twice.search(file.read_text(encoding="utf-8")), file
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--config-settings=wheel.cmake=false", f"--wheel-dir={tmp_path}", ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"quantmoe/runtime/generate.py", "quantmoe/benchmarks/quality/heldout.txt"} <= set(names)
    assert [name for name in names if twice.search(name)] == []


needs_make = pytest.mark.skipif(not shutil.which("make"), reason="needs make")


def program(folder: Path, name: str, body: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    (folder / name).chmod(stat.S_IRWXU)


def packages(locked: Path) -> dict[str, list[str]]:
    """Name and version -> hashes."""
    found: dict[str, list[str]] = {}
    for line in locked.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if not line[:1].isspace() and not line.startswith("#"):
            found[words[0]] = hashes = []
        elif words[0].startswith("--hash=sha256:"):
            hashes.append(words[0])
    return found


@pytest.mark.parametrize("name", ["main", "cuda", "ray", "oldest", "model", "real", "conan", "optimum"])
def test_locked(name: str) -> None:
    """Each package has one version and its hashes, and no index is named."""
    assert "://" not in (ROOT / "packages" / "locked" / f"{name}.txt").read_text(encoding="utf-8")
    found = packages(ROOT / "packages" / "locked" / f"{name}.txt")
    assert found
    for package, hashes in found.items():
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][a-z0-9.+]*", package), package
        assert hashes, package
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", text) for text in hashes), package


def test_locked_has_what_is_asked_for() -> None:
    """A requirement of pyproject.toml that changes needs `make lock`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    build = [
        line
        for override in project["tool"]["scikit-build"]["overrides"]
        for line in override.get("build", {}).get("requires", [])
    ]
    ray = (ROOT / "samples/ray_serve/requirements.txt").read_text(encoding="utf-8").split()
    cuda = groups.pop("cuda")
    main = [
        *project["project"]["dependencies"],
        *build,
        *(line for lines in (extras | groups).values() for line in lines),
    ]
    for name, wanted in {"main": main, "cuda": cuda, "ray": ray}.items():
        versions = [Requirement(package) for package in packages(ROOT / "packages" / "locked" / f"{name}.txt")]
        for line in wanted:
            requirement = Requirement(line)
            if requirement.name == "quantmoe":
                continue
            found = [str(v.specifier)[2:] for v in versions if v.name == canonicalize_name(requirement.name)]
            assert found, f"{name}: {line}"
            assert all(version in requirement.specifier for version in found), f"{name}: {line}, locked {found}"


@needs_make
@pytest.mark.parametrize("chosen", ["", "cu130"])
def test_what_make_installs_is_locked(tmp_path: Path, chosen: str) -> None:
    """By hash; a build in PyTorch's own index has others than PyPI's, and is held to its version."""
    program(tmp_path / "bin", "python", "")
    program(tmp_path / "bin", "uv", 'echo "$UV_REQUIRE_HASHES $UV_CONSTRAINT; $*"')
    environment = {k: v for k, v in os.environ.items() if k not in ("UV_TORCH_BACKEND", "MAKEFLAGS")}
    environment |= {"UV_TORCH_BACKEND": chosen} if chosen else {}
    command = ["make", "--silent", "-C", str(ROOT), "venv", f"VENV={tmp_path}", f"BIN={tmp_path}/bin"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    locked = ROOT / ("build/locked.txt" if chosen else "packages/locked/main.txt")
    assert said.startswith(f"{'false' if chosen else 'true'} {locked}; pip install ")
    if chosen:
        version, hashes = next(
            item for item in packages(ROOT / "packages/locked/main.txt").items() if item[0].startswith("torch==")
        )
        assert hashes
        assert packages(locked) == packages(ROOT / "packages/locked/main.txt") | {version: []}


@needs_make
def test_jobs() -> None:
    """As many test processes as cores, which is what nproc says."""
    command = ["make", "-n", "-C", str(ROOT), "test"]
    said = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
    )
    assert "pytest -n 1 " in said.stdout


DEBIAN = any(f"ID={name}\n" in Path("/etc/os-release").read_text(encoding="utf-8") for name in ("debian", "ubuntu"))


@pytest.mark.skipif(not DEBIAN, reason="fetches from Debian's or Ubuntu's archive")
@pytest.mark.parametrize(
    ("archive", "message"),
    [
        pytest.param("exit 100", "package sources have no libonnxruntime-dev 1.", id="version-gone"),
        pytest.param(
            "echo \\'address/x.deb\\' x.deb 1", "have SHA-256 afd4[0-9a-f]{60}, expected [0-9a-f]{64}", id="other-bytes"
        ),
    ],
)
def test_headers_are_pinned(tmp_path: Path, archive: str, message: str) -> None:
    """apt-get and dpkg that give something else than the version and the hash in the script."""
    program(
        tmp_path / "bin",
        "apt-get",
        f'case "$*" in *--print-uris*) {archive};; *download*) :> libonnxruntime-dev_1.deb;; esac',
    )
    program(tmp_path / "bin", "dpkg", "mkdir -p root/usr/include; echo others > root/usr/include/onnxruntime_c_api.h")
    run = subprocess.run(
        ["sh", ROOT / "ort_ext/onnxruntime_headers.sh", tmp_path / "headers"],
        env=os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode
    assert re.search(message, run.stderr), run.stderr
    assert not (tmp_path / "headers").exists()
    assert archive.startswith("exit") or run.stdout == "Fetching ONNX Runtime's headers: address/x.deb\n"


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_alpine_is_refused_by_name(tmp_path: Path) -> None:
    program(tmp_path, "ldd", 'echo "musl libc (x86_64)" >&2; exit 1')
    environment = {k: v for k, v in os.environ.items() if k != "ORT_ROOT"} | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}"
    }
    command = ["cmake", "-P", ROOT / "ort_ext/FindORTHeaders.cmake"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode
    assert "This system has musl, as Alpine does" in " ".join(done.stderr.split())


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_headers_of_an_unzipped_nuget_package(tmp_path: Path) -> None:
    """By ORT_ROOT or ORT_INCLUDE_DIR. A build folder takes another ORT_ROOT later, and keeps an ORT_INCLUDE_DIR."""

    def package(name: str) -> Path:
        headers = tmp_path / name / "build/native/include"
        headers.mkdir(parents=True)
        (headers / "onnxruntime_c_api.h").write_text("#define ORT_API_VERSION 31\n", encoding="utf-8")
        return headers

    first, second = package("first"), package("second")
    project = f"cmake_minimum_required(VERSION 3.25)\nproject(a NONE)\ninclude({ROOT}/ort_ext/FindORTHeaders.cmake)\n"
    (tmp_path / "CMakeLists.txt").write_text(project, encoding="utf-8")

    def found(build: str, *options: str) -> str:
        command = ["cmake", "-S", tmp_path, "-B", tmp_path / build, *options]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return re.findall("ONNX Runtime headers: (.*)", done.stdout)[0]

    assert found("a", f"-DORT_ROOT={tmp_path}/first") == str(first)
    assert found("a", f"-DORT_ROOT={tmp_path}/second") == str(second)
    assert found("b", f"-DORT_INCLUDE_DIR={first}") == str(first)
    assert found("b") == str(first)
    given = found("a", f"-DORT_INCLUDE_DIR={first}", f"-DORT_ROOT={tmp_path}/second")
    assert given == str(first)


def test_ci_takes_each_release_of_onnx_runtime() -> None:
    """Two in a run, in turns, and all of them in `.ci/run all`; the oldest and the newest have a turn of their own."""
    (part,) = re.findall(r"^between\(\).*?^}$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.M | re.S)

    def between(time: object) -> list[str]:
        command = ["bash", "-euo", "pipefail", "-c", f"{part}\nbetween '{time}'"]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()

    (oldest, *others, newest) = re.findall(r"[0-9.]+", re.findall("^ORT_RELEASES := (.*)$", MAKEFILE, re.M)[0])
    assert (oldest, newest) == ("1.21", re.findall("^onnxruntime==([0-9]+[.][0-9]+)", LOCKED, re.M)[0])
    assert between("") == others == [f"1.{minor}" for minor in range(22, int(newest[2:]))]
    runs = [between(time) for time in range(0, len(others) * 10800, 10800)]
    assert {len(set(run)) for run in runs} == {2}
    assert {version for run in runs for version in run} == set(others)


def test_turns_of_ci() -> None:
    """Each path in the table of .ci/run exists, each turn is a function or a numbered part of one, and a run has
    less than 60 minutes of turns, those of the touched paths first. It names touched turns that it leaves out."""
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    (table,) = re.findall(r"^table='\n(.*?)^'$", script, re.M | re.S)
    minutes = {}
    for turn, cost, *paths in map(str.split, table.splitlines()):
        minutes[turn] = int(cost)
        name = re.sub(r"(?<=sanitize)\d|(?<=sweep)\d", "", turn)
        assert f"\n{name}() {{" in script, turn
        assert [path for path in paths if not (ROOT / path).exists()] == [], turn
    (part,) = re.findall(r"^table=.*?^choose\(\).*?^}$", script, re.M | re.S)

    def choose(time: int, *touched: str) -> tuple[list[str], str]:
        git = f"git() {{ printf '%s\\n' {' '.join(touched)}; }}"
        command = ["bash", "-euo", "pipefail", "-c", f"{part}\n{git}\nchoose {time}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        chosen = done.stdout.split()
        assert len(set(chosen)) == len(chosen)
        assert sum(minutes[turn] for turn in chosen) < 60
        return chosen, done.stderr

    core, ran = {"cuda90a", "compilers", "sanitize1", "sanitize2", "fuzz", "threads"}, set[str]()
    for time in range(0, 30 * 10800, 10800):
        chosen, left = choose(time, "custom_ops/src/cuda/moe/launch.cu", "docs/lab/x.md")
        assert ({*chosen}, left) == ({"cuda90a", "cuda80", "cuda120a"}, "")
        chosen, left = choose(time, "ort_ext/serving/app.py", "samples/python/generate.py")
        assert ({*chosen[:2]}, left) == ({"users", "serve"}, "")
        assert len(chosen) > 2
        chosen, left = choose(time, "custom_ops/src/core/shapes.cc")
        assert left.startswith("touched, but no room beside ")
        assert core <= {*chosen} | {*left.rpartition(": ")[2].split()}
        ran |= {*chosen}
    assert core <= ran
