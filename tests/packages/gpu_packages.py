"""The packages for GPUs, made of another library of that name: `make test-packages` calls this."""

import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from packages.nuget import dotnet

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
#: .NET's platform: the library, ONNX Runtime's library, the end of the name of ONNX Runtime's package for GPUs
PLATFORMS = {
    "linux-x64": ("libquantmoe_ort_cuda.so", "libonnxruntime.so", "Linux"),
    "win-x64": ("quantmoe_ort_cuda.dll", "onnxruntime.dll", "Windows"),
}
#: ONNX Runtime's packages for GPUs, and one for CPUs on Windows, as of a later version: no test has the real ones
RUNTIME = """<package><metadata><id>{id}</id><version>1.99.0</version>
<authors>test</authors><description>test</description></metadata></package>"""
PROJECT = """<Project Sdk="Microsoft.NET.Sdk"><PropertyGroup><OutputType>Exe</OutputType><UseAppHost>false</UseAppHost>
<TargetFramework>net10.0</TargetFramework><RestorePackagesPath>packages</RestorePackagesPath>
<RestoreAdditionalProjectSources>source;{dist}</RestoreAdditionalProjectSources></PropertyGroup><ItemGroup>
<PackageReference Include="QuantMoe.Cuda" Version="*" />
<PackageReference Include="Microsoft.ML.OnnxRuntime" Version="{cpu}" />
<PackageReference Include="Microsoft.ML.OnnxRuntime.Gpu.{system}" Version="1.99.0" /></ItemGroup></Project>"""


@pytest.fixture
def natives(tmp_path: Path) -> Path:
    """Lay out a library for each platform as `make natives` does, and return the folder; Windows' is another file."""
    (tmp_path / "wheels").mkdir()
    linux, windows = (tmp_path / "wheels" / name for name, _, _ in PLATFORMS.values())
    shutil.copy(ROOT / "build/natives/linux-x64/libquantmoe_ort.so", linux)
    windows.write_bytes(b"MZ of a test")
    script = [sys.executable, ROOT / "packages/natives.py", "quantmoe_ort_cuda", tmp_path / "wheels"]
    subprocess.run([*script, tmp_path / "natives"], check=True)
    return tmp_path / "natives"


@pytest.mark.skipif(not shutil.which("dotnet"), reason="needs dotnet")
@pytest.mark.parametrize(("platform", "named"), [("linux-x64", False), ("linux-x64", True), ("win-x64", True)])
def test_nuget(tmp_path: Path, natives: Path, platform: str, named: bool) -> None:
    """A program gets the library, and ONNX Runtime's for GPUs instead of the one that QuantMoe brings."""
    source, (name, runtime, system) = tmp_path / "source", PLATFORMS[platform]
    library = (natives / platform / name).read_bytes()
    options = [f"-p:Version={VERSION}", f"-p:CudaNatives={natives}", "--output", source]
    dotnet(
        "pack", *options, "--artifacts-path", ROOT / "build/nuget/artifacts", ROOT / "packages/nuget/src/QuantMoe.Cuda"
    )
    with zipfile.ZipFile(source / f"QuantMoe.Cuda.{VERSION}.nupkg") as package:
        for rid, (file, _, _) in PLATFORMS.items():
            assert package.read(f"runtimes/{rid}/native/{file}") == (natives / rid / file).read_bytes()
        assert package.read("LICENSE") == (ROOT / "LICENSE").read_bytes()
        nuspec = package.read("QuantMoe.Cuda.nuspec").decode()
        assert f'<dependency id="QuantMoe" version="{VERSION}"' in nuspec
        assert not [name for name in package.namelist() if name.startswith("lib/")]
    for id_, text in (
        ("Microsoft.ML.OnnxRuntime", b"for CPUs"),
        (f"Microsoft.ML.OnnxRuntime.Gpu.{system}", b"for GPUs"),
    ):
        with zipfile.ZipFile(source / f"{id_}.1.99.0.nupkg", "w") as package:
            package.writestr(f"{id_}.nuspec", RUNTIME.format(id=id_))
            package.writestr(f"runtimes/{platform}/native/{runtime}", text)
    cpu = "1.99.0" if system == "Windows" else "1.31.1"
    (tmp_path / "App.csproj").write_text(PROJECT.format(dist=ROOT / "dist", system=system, cpu=cpu), encoding="utf-8")
    program = "System.Console.WriteLine(QuantMoe.Device.Cuda);"
    (tmp_path / "Program.cs").write_text(program, encoding="utf-8")
    dotnet("build", *([f"-p:RuntimeIdentifier={platform}", "-p:SelfContained=false"] if named else []), tmp_path)
    (app,) = (file.parent for file in tmp_path.glob("bin/**/App.dll"))
    folder = app if named else app / f"runtimes/{platform}/native"
    assert (folder / name).read_bytes() == library
    assert (folder / runtime).read_bytes() == b"for GPUs"
    assert platform != "linux-x64" or (folder / "libquantmoe_ort.so").exists()
    deps = json.loads((app / "App.deps.json").read_text(encoding="utf-8"))
    (target,) = (packages for packages in deps["targets"].values() if packages)
    said = json.dumps([files for name, files in target.items() if name.startswith("Microsoft.ML.OnnxRuntime/")])
    assert platform not in said
    assert f'"{runtime}"' not in said


@pytest.mark.skipif(not shutil.which("mvn"), reason="needs mvn")
@pytest.mark.parametrize(
    ("platform", "classifier"), [("linux-x64", "linux-x86_64-cuda"), ("win-x64", "windows-x86_64-cuda")]
)
def test_jar(tmp_path: Path, natives: Path, platform: str, classifier: str) -> None:
    """The jar of the classifier has the library where QuantMoE looks for it, and its own name as a module."""
    for part in ("packages/java/pom.xml", "packages/java/src"):
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / part).symlink_to(ROOT / part)
    shutil.copytree(natives / platform, tmp_path / "build/java/cuda" / platform / "quantmoe/native" / platform)
    pom = tmp_path / "packages/java/pom.xml"
    for other in ("linux-x86_64-cuda", "linux-aarch64-cuda", "windows-x86_64-cuda"):
        subprocess.run(["mvn", "-q", "-B", "-ntp", "-f", pom, f"jar:jar@{other}"], check=True)
    (jar,) = (tmp_path / "build/java").glob("*.jar")  # no jar without a library
    assert jar.name == f"quantmoe-{VERSION}-{classifier}.jar"
    with zipfile.ZipFile(jar) as archive:
        library = f"{platform}/{PLATFORMS[platform][0]}"
        assert archive.read(f"quantmoe/native/{library}") == (natives / library).read_bytes()
        assert b"Automatic-Module-Name: quantmoe.cuda" in archive.read("META-INF/MANIFEST.MF")
