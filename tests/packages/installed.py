"""What `cmake --install` leaves, in programs that have nothing else: `make test-cmake` calls this."""

import os
import shlex
import shutil
from pathlib import Path

import pytest
from support.harness.other_languages import ROOT, RUNTIME, cmake, onnxruntime_headers, quantmoe, run

SOURCE = ROOT / "packages/conan/test_package"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", os.environ["QUANTMOE_CMAKE"], "--prefix", folder)
    return folder


@pytest.fixture(scope="module")
def tokens() -> str:
    prompt = ["--ids", "1,2,3", "--max-new-tokens", "8", "--temperature", "0"]
    return quantmoe("generate", os.environ["QUANTMOE_MODEL"], *prompt)


def test_find_package(prefix: Path, tokens: str, tmp_path: Path) -> None:
    """A program links either library and registers the operators, without a path of it."""
    cmake(SOURCE, tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    for kind in ("ort", "ort_static"):
        assert run(tmp_path / f"consumer_{kind}", os.environ["QUANTMOE_MODEL"]).split() == tokens.strip().split(","), (
            kind
        )
    needed = run("objdump", "-p", tmp_path / "consumer_ort_static")
    assert "libquantmoe" not in needed


def test_find_package_refuses(prefix: Path, tmp_path: Path) -> None:
    """A component that is not installed, and another version."""
    for asked, said in {
        "COMPONENTS absent": "no component absent; expected tokens, or text where",
        "9.9": 'compatible with requested version "9.9"',
    }.items():
        project = f"cmake_minimum_required(VERSION 3.25)\nproject(a CXX)\nfind_package(quantmoe {asked} REQUIRED)\n"
        (tmp_path / "CMakeLists.txt").write_text(project, encoding="utf-8")
        with pytest.raises(AssertionError, match=said):
            cmake(tmp_path, tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}")


@pytest.mark.parametrize("static", [False, True])
def test_pkg_config(prefix: Path, tokens: str, tmp_path: Path, static: bool) -> None:
    (file,) = prefix.glob("lib*/**/quantmoe.pc")
    (library,) = prefix.glob("lib*/**/libquantmoe_ort.a")
    options = ["--static", f"--define-variable=libdir={tmp_path}"] if static else []
    (tmp_path / library.name).symlink_to(library)
    flags = shlex.split(run("pkg-config", "--cflags", "--libs", *options, file))
    program, library_path = tmp_path / "consumer", f"{library.parent}:{tmp_path}"
    (tmp_path / "libonnxruntime.so.1").symlink_to(RUNTIME)
    sources = ["-std=c++20", f"-I{onnxruntime_headers()}", SOURCE / "consumer.cc", tmp_path / "libonnxruntime.so.1"]
    run("c++", *sources, *flags, "-o", program)
    assert run(program, os.environ["QUANTMOE_MODEL"], LD_LIBRARY_PATH=library_path).split() == tokens.strip().split(",")
    assert ("libquantmoe" in run("objdump", "-p", program)) == (not static)


def test_conan(tokens: str, tmp_path: Path) -> None:
    """`conan create` builds the package, and programs that have it print the model's tokens."""
    if not shutil.which("conan"):
        pytest.skip("needs conan")
    flags = ["-O1", "-DQM_TILE_ROWS=3"]  # in haste
    places = {"ort_root": Path(onnxruntime_headers()).parent, "ort_include_dir": onnxruntime_headers()}
    options = [
        f"-c=user.quantmoe:{name}={place}" for name, place in (places | {"ort_library_dir": RUNTIME.parent}).items()
    ]
    settings = ["-s=build_type=Debug", "-s=compiler.cppstd=20", f"-c=tools.build:cxxflags={flags}"]
    environment = {"CONAN_HOME": str(tmp_path), "QUANTMOE_MODEL": os.environ["QUANTMOE_MODEL"]}
    run("conan", "profile", "detect", **environment)
    said = run(
        "sh",
        "-c",
        'exec "$@" 2>&1',
        "sh",
        "conan",
        "create",
        ROOT / "packages/conan",
        *options,
        *settings,
        **environment,
    )
    assert said.count(tokens.strip().replace(",", " ")) == 2
