"""What is in the packages of dist and build/java: `make test-packages` calls this, as `make test` makes no packages."""

import hashlib
import io
import json
import re
import shutil
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path

import lief
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.harness.elf import check_segments, newest_glibc
from support.harness.other_languages import run
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
NATIVES = {f"{p.parent.name}/{p.name}": p.read_bytes() for p in (ROOT / "build/natives").glob("*/*")}
#: of each library: the most bytes, for GPUs 80 MB for each of five architectures; the function that programs look up
LIBRARIES = {
    "quantmoe": (8_000_000, "qm_run"),
    "quantmoe_ort": (8_000_000, "RegisterCustomOps"),
    "quantmoe_text": (6_000_000, "qm_tokenizer_open"),
    "quantmoe_cuda": (400_000_000, "qm_cuda_launch"),
    "quantmoe_ort_cuda": (400_000_000, "RegisterCustomOps"),
    "quantmoe_trt": (400_000_000, "getCreators"),
}
#: functions that a library may export; operator new and delete are zig's, on macOS
EXPORTED = re.compile(
    r"qm_\w+|RegisterCustomOps|CreateEpFactories|ReleaseEpFactory|getCreators|setLoggerFinder|Java_quantmoe_\w+|__?Z[nd]\w+|_mh_dylib_header|__dso_handle"
)
#: libraries that every system of a platform has
SYSTEM = re.compile(
    r"(libc|libm|libpthread|libdl|ld-linux.*)\.so\.\d|(api-ms-win-.*|KERNEL32|ntdll|bcryptprimitives)\.dll|/usr/lib/libSystem\.B\.dylib"
)
#: what a program is compiled for, and what runs it on another platform
PROGRAMS = {
    "linux-x64": ("x86_64-linux-gnu.2.28", []),
    "linux-arm64": ("aarch64-linux-gnu.2.28", ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]),
}
LICENCES = {name: (ROOT / name).read_bytes() for name in ("LICENSE", "THIRD_PARTY_NOTICES.txt")}
#: how a library of a wheel's platform begins: its format, and of ELF e_machine at byte 18
PLATFORMS = {
    "manylinux.*_x86_64": rb"\x7fELF.{14}\x3e\0",
    "manylinux.*_aarch64": rb"\x7fELF.{14}\xb7\0",
    "win_amd64": rb"MZ",
    "macosx_.*_arm64": rb"\xcf\xfa\xed\xfe\x0c\0\0\x01",
}


@pytest.fixture
def jar():
    with zipfile.ZipFile(ROOT / f"build/java/quantmoe-{VERSION}.jar") as archive:
        yield archive


def test_one_version():
    for name, text in {
        "CMakeLists.txt": f"project(quantmoe VERSION {VERSION} ",
        "packages/java/pom.xml": f"<artifactId>quantmoe</artifactId>\n  <version>{VERSION}<",
        "samples/java/pom.xml": f"<artifactId>quantmoe</artifactId>\n      <version>{VERSION}<",
        "samples/java_adapters/pom.xml": f"<artifactId>quantmoe</artifactId>\n      <version>{VERSION}<",
        "packages/cuda/pyproject.toml": f'version = "{VERSION}"\ndescription',
        "packages/vcpkg/ports/quantmoe/vcpkg.json": f'"version": "{VERSION}"',
        "packages/rust/Cargo.toml": f'[workspace.package]\nversion = "{VERSION}"\n',
    }.items():
        assert text in (ROOT / name).read_text(encoding="utf-8"), name


def test_gradle():
    """The guide names the same artifacts for Gradle as for Maven, in the same versions."""
    guide = (ROOT / "docs/guides/java.md").read_text(encoding="utf-8")
    tags = "<groupId>(.+?)</groupId><artifactId>(.+?)</artifactId><version>(.+?)</version>"
    maven = [":".join(found) for found in re.findall(tags, guide)]
    assert maven[0] == f"io.github.quantmoe:quantmoe:{VERSION}"
    assert re.findall(r'implementation\("(.+?)"\)', guide) == maven


def check_library(name, data, glibc):
    """Size, functions and segments of a library, and the newest glibc whose functions it may call."""
    largest, function = LIBRARIES[Path(name).stem.removeprefix("lib")]
    assert len(data) <= largest, name
    exported = {entry.name for entry in lief.parse(io.BytesIO(data)).exported_functions}
    if name.endswith(".dylib"):
        exported = {symbol.removeprefix("_") for symbol in exported}
    assert function in exported, name
    assert [symbol for symbol in exported if not EXPORTED.fullmatch(symbol)] == [], name
    if data.startswith(b"\x7fELF"):
        check_segments(data)
        assert newest_glibc(data) <= glibc, name


def test_natives():
    assert NATIVES
    for name, data in NATIVES.items():
        magic = {"linux": b"\x7fELF", "win": b"MZ", "osx": b"\xcf\xfa\xed\xfe"}[name.split("-")[0]]
        assert data.startswith(magic), name
        newer = name.startswith("linux-arm64/") and "_text." not in name  # the wheel's tag says it
        check_library(name, data, (2, 99) if newer else (2, 28))


@pytest.mark.parametrize("name", [name for name in NATIVES if "_text." in name])
def test_text_library(name):
    """It exports the functions of its header and of Java's ChatTemplate, and needs the system's libraries alone."""
    library = lief.parse(str(ROOT / "build/natives" / name))
    header = (ROOT / "packages/rust/text/include/quantmoe/text.h").read_text(encoding="utf-8")
    functions = {f"Java_quantmoe_ChatTemplate_{of}" for of in ("error", "free", "open", "turn")}
    functions |= set(re.findall(r"\b(qm_\w+)\(", header))
    exported = {function.name for function in library.exported_functions}
    assert {symbol.removeprefix("_") if name.startswith("osx-") else symbol for symbol in exported} == functions
    needed = [getattr(entry, "name", entry) for entry in library.libraries]
    own = ["@rpath/libquantmoe_text.dylib"] if name.startswith("osx-") else []
    assert [one for one in needed if not SYSTEM.fullmatch(one)] == own


@pytest.mark.parametrize("name", [name for name in NATIVES if "_text." in name])
def test_text_library_runs(name, tmp_path):
    """text.c gets the token ids of Python's tokenizers, where a program of the platform runs here."""
    platform, library = name.split("/")
    target, starter = PROGRAMS.get(platform, ("", []))
    if not target or any(not Path(word).exists() and not shutil.which(word) for word in starter if word != "-L"):
        pytest.skip(f"no program for {platform} runs here")
    shutil.copy(ROOT / "build/natives" / name, tmp_path)
    source, header, program = ROOT / "tests/packages/text.c", ROOT / "packages/rust/text/include", tmp_path / "text"
    zig = Path(sys.executable).with_name("python-zig")
    run(zig, "cc", "-target", target, "-I", header, source, tmp_path / library, "-o", program, "-Wl,-rpath,$ORIGIN")
    model, text = ROOT / "samples/demo_model/checkpoint", "Then said the captain: go on!"
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    assert run(*starter, program, model, text).strip() == f"{' '.join(map(str, ids))} {text}"


def check_dates(archive):
    """All entries have one date, the commit's: tools that copy by date take a newer library."""
    (date,) = {entry.date_time for entry in archive.infolist()}
    assert date > (2026,)


def test_jar(jar):
    found = {
        n.removeprefix("quantmoe/native/"): jar.read(n) for n in jar.namelist() if "/native/" in n and n[-1] != "/"
    }
    assert found == NATIVES
    assert {name: jar.read(f"META-INF/{name}") for name in LICENCES} == LICENCES
    if any("_text." in library for library in found):
        assert b"\ntokenizers " in jar.read("META-INF/THIRD_PARTY_NOTICES_TEXT.txt")
    check_dates(jar)
    assert f"Implementation-Version: {VERSION}".encode() in jar.read("META-INF/MANIFEST.MF")


def test_jars_of_sources_and_documentation():
    """Every source file is in one of them; every public class has its page in the other."""
    sources = {p.name: p.read_bytes() for p in (ROOT / "packages/java/src/main/java/quantmoe").glob("*.java")}
    with zipfile.ZipFile(ROOT / f"build/java/quantmoe-{VERSION}-sources.jar") as archive:
        found = [n for n in archive.namelist() if n.endswith(".java")]
        assert {n.removeprefix("quantmoe/"): archive.read(n) for n in found} == sources
    public = [name[:-5] for name, text in sources.items() if re.search(rb"^public ", text, re.MULTILINE)]
    assert {"Generator", "Chat", "Device"} < set(public) < {name[:-5] for name in sources}
    with zipfile.ZipFile(ROOT / f"build/java/quantmoe-{VERSION}-javadoc.jar") as archive:
        assert {f"quantmoe/quantmoe/{name}.html" for name in public} <= set(archive.namelist())


def test_pom(jar):
    """What Maven Central asks of the POM in the jar. The GitHub name in the URLs proves the group."""
    pom = jar.read("META-INF/maven/io.github.quantmoe/quantmoe/pom.xml").decode()
    root = ElementTree.fromstring(re.sub(r' xmlns="[^"]*"', "", pom, count=1))
    assert (root.findtext("groupId"), root.findtext("artifactId")) == ("io.github.quantmoe", "quantmoe")
    assert (root.findtext("version"), root.findtext("packaging", "jar")) == (VERSION, "jar")
    home = "https://github.com/quantmoe/"
    for path in ("url", "developers/developer/url", "scm/url"):
        assert f"{root.findtext(path)}/".startswith(home), path
    assert root.findtext("scm/connection").startswith(f"scm:git:{home}")
    assert root.findtext("licenses/license/url") == "https://www.apache.org/licenses/LICENSE-2.0.txt"
    for path in (
        "name",
        "description",
        "developers/developer/name",
        "licenses/license/name",
        "scm/developerConnection",
    ):
        assert root.findtext(path), path


@pytest.mark.parametrize("wheel", sorted((ROOT / "dist").glob("**/*.whl")), ids=lambda wheel: wheel.name)
def test_wheel(wheel):
    name = "quantmoe_cuda" if wheel.parent.name == "cuda" else "quantmoe"
    assert wheel.name.startswith(f"{name}-{VERSION}-py3-none-")
    with zipfile.ZipFile(wheel) as archive:
        folder = f"{name}-{VERSION}.dist-info/licenses"
        assert {name: archive.read(f"{folder}/{name}") for name in LICENCES} == LICENCES
        libraries = [n for n in archive.namelist() if n.endswith((".so", ".dll", ".dylib"))]
        glibc = min((tuple(map(int, tag)) for tag in re.findall(r"manylinux_(\d+)_(\d+)", wheel.stem)), default=())
        (begin,) = (b for tag, b in PLATFORMS.items() if re.fullmatch(f".*-{tag}", wheel.stem))
        assert libraries
        for library in libraries:
            data = archive.read(library)
            assert re.match(begin, data, re.DOTALL), library
            check_library(library, data, glibc)


@pytest.mark.parametrize("wheel", sorted((ROOT / "dist/cuda").glob("*.whl")), ids=lambda wheel: wheel.name)
def test_cuda_wheel(wheel):
    """The libraries lie where quantmoe looks for them, and nothing else does."""
    with zipfile.ZipFile(wheel) as archive:
        found = {n: archive.read(n) for n in archive.namelist() if n.startswith("quantmoe/") and n[-1] != "/"}
    windows = wheel.stem.endswith("-win_amd64")
    begin, end = ("", ".dll") if windows else ("lib", ".so")
    entries = {
        f"quantmoe/custom_ops/{begin}quantmoe_cuda{end}": b"qm_cuda_launch",
        f"quantmoe/ort_ext/{begin}quantmoe_ort_cuda{end}": b"RegisterCustomOps",
        **({} if windows else {"quantmoe/trt_plugins/libquantmoe_trt.so": b"getCreators"}),
    }
    assert set(found) == set(entries)
    for name, data in found.items():
        assert entries[name] in data, name


@pytest.fixture(scope="module")
def bill():
    return json.loads((ROOT / f"dist/quantmoe-{VERSION}.cdx.json").read_text(encoding="utf-8"))


def test_bill_has_the_files(bill):
    """Each file that is published, with its hash, and no other."""
    found = {c["name"]: c["hashes"] for c in bill["components"] if c["type"] == "file"}
    paths = [*(ROOT / "dist").glob("*.*"), *(ROOT / "dist/cuda").glob("*.whl"), *(ROOT / "build/java").glob("*.jar")]
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if path.suffix != ".json" and path.name[0] != "."
    }
    assert found == {name: [{"alg": "SHA-256", "content": digest}] for name, digest in files.items()}
    assert any(name.endswith(".jar") for name in found)


def test_bill_has_what_the_wheel_needs(bill):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    wanted = {canonicalize_name(Requirement(line).name) for line in lines} - {"quantmoe"}
    packages = {c["bom-ref"]: c for c in bill["components"] if c.get("purl", "").startswith("pkg:pypi/")}
    assert {c["name"] for c in packages.values()} > wanted
    product = bill["metadata"]["component"]
    assert (product["name"], product["version"]) == ("quantmoe", VERSION)
    graph = {entry["ref"]: entry["dependsOn"] for entry in bill["dependencies"]}
    assert {packages[ref]["name"] for ref in graph[product["bom-ref"]] if ref.startswith("pkg:pypi/")} == wanted
    assert "mpmath" in {packages[ref]["name"] for refs in graph.values() for ref in refs if ref in packages}  # sympy's
    assert not {"pytest", "sphinx"} & {c["name"] for c in packages.values()}  # what builds and tests it


def test_bill_has_the_crates(bill):
    """The bill of materials has the crates of the text library, with hashes, where a package has the library."""
    crates = {c["name"]: c for c in bill["components"] if c.get("purl", "").startswith("pkg:cargo/")}
    assert ("tokenizers" in crates) == any("_text." in library for library in NATIVES)
    assert not {"quantmoe-text", "cc"} & set(crates)  # the library itself, and what only its build needs
    for crate in crates.values():
        assert re.fullmatch("[0-9a-f]{64}", crate["hashes"][0]["content"])
        assert re.fullmatch(r"[\w.() -]+", crate["licenses"][0]["expression"]), crate


def test_bill_is_cyclonedx(bill):
    """What the format asks for: names, types, unique references that lead somewhere."""
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    refs = [bill["metadata"]["component"]["bom-ref"], *(c["bom-ref"] for c in bill["components"])]
    assert len(refs) == len(set(refs))
    assert all(c["name"] and c["type"] in ("file", "library") for c in bill["components"])
    assert all({entry["ref"], *entry["dependsOn"]} <= set(refs) for entry in bill["dependencies"])


def test_bill_and_notices_agree(bill):
    """What is linked into the libraries has its licence in THIRD_PARTY_NOTICES.txt."""
    notices = LICENCES["THIRD_PARTY_NOTICES.txt"].decode()
    linked = [c["name"] for c in bill["components"] if c["bom-ref"].startswith("linked:")]
    assert len(linked) == 6
    for name in linked:
        assert re.split(r" headers| runtime|:| and", name)[0].lower() in notices.lower(), name


PACKAGES = ("QuantMoe", "QuantMoe.Extensions.AI")


@pytest.fixture(params=PACKAGES)
def nupkg(request):
    if not shutil.which("dotnet"):
        pytest.skip("NuGet's packages need dotnet")
    with zipfile.ZipFile(ROOT / f"dist/{request.param}.{VERSION}.nupkg") as archive:
        yield archive


def nuspec(nupkg):
    """Return the name and the metadata of a package."""
    (name,) = (name for name in nupkg.namelist() if name.endswith(".nuspec"))
    metadata = ElementTree.fromstring(nupkg.read(name))[0]
    space = metadata.tag.removesuffix("metadata")
    return name.removesuffix(".nuspec"), {child.tag.removeprefix(space): child for child in metadata}


def test_nupkg(nupkg):
    assert nupkg.testzip() is None
    check_dates(nupkg)
    name, _ = nuspec(nupkg)
    native = re.compile(r"runtimes/(.+)/native/(.+)")
    found = {f"{m[1]}/{m[2]}": nupkg.read(m[0]) for m in map(native.fullmatch, nupkg.namelist()) if m}
    assert found == (NATIVES if name == "QuantMoe" else {})
    assert {name: nupkg.read(name) for name in LICENCES} == LICENCES
    if any("_text." in library for library in found):
        assert b"\ntokenizers " in nupkg.read("THIRD_PARTY_NOTICES_TEXT.txt")
    for framework in ("netstandard2.0", "net10.0"):
        assert b"MPDB" in nupkg.read(f"lib/{framework}/{name}.dll")  # an assembly with its symbols in it
        assert nupkg.read(f"lib/{framework}/{name}.xml")


def test_nuspec(nupkg):
    """What NuGet asks of it, and that what it names is there."""
    name, one = nuspec(nupkg)
    assert set(one) >= {"id", "version", "authors", "description", "license", "readme"}
    assert (one["id"].text, one["version"].text) == (name, VERSION)
    assert (one["license"].get("type"), one["license"].text) == ("expression", "Apache-2.0")
    assert one["readme"].text in nupkg.namelist()
    home = "https://github.com/quantmoe/quantmoe"
    assert (one["projectUrl"].text, one["repository"].get("url")) == (home, f"{home}.git")
    needed = {g.get("targetFramework"): {d.get("id"): d.get("version") for d in g} for g in one["dependencies"]}
    assert set(needed) == {"net10.0", ".NETStandard2.0"}
    wanted = ("Microsoft.ML.OnnxRuntime", "1.31.1") if name == "QuantMoe" else ("QuantMoe", VERSION)
    assert wanted in needed["net10.0"].items()


def test_open_packaging(nupkg):
    """A part's type is known by its extension or name, and the manifest by its relationship."""
    types = ElementTree.fromstring(nupkg.read("[Content_Types].xml"))
    extensions = {t.get("Extension") for t in types if t.get("Extension")}
    names = {t.get("PartName") for t in types if t.get("PartName")}
    for part in set(nupkg.namelist()) - {"[Content_Types].xml"}:
        assert Path(part).suffix[1:] in extensions or f"/{part}" in names or part == "_rels/.rels", part
    manifest, *_ = ElementTree.fromstring(nupkg.read("_rels/.rels"))
    assert manifest.get("Target") == f"/{nuspec(nupkg)[0]}.nuspec"
