"""The packages for GPUs, made of another library of that name: `make test-packages` calls this."""

import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from nuget import dotnet

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
NAME = "libquantmoe_ort_cuda.so"
#: ONNX Runtime for GPUs, of which no test has the real package
GPU_RUNTIME = """<package><metadata><id>Microsoft.ML.OnnxRuntime.Gpu.Linux</id><version>1.31.1</version>
<authors>test</authors><description>test</description></metadata></package>"""
PROJECT = """<Project Sdk="Microsoft.NET.Sdk"><PropertyGroup><OutputType>Exe</OutputType><UseAppHost>false</UseAppHost>
<TargetFramework>net10.0</TargetFramework><RestorePackagesPath>packages</RestorePackagesPath>
<RestoreAdditionalProjectSources>source;{dist}</RestoreAdditionalProjectSources></PropertyGroup><ItemGroup>
<PackageReference Include="QuantMoe.Cuda" Version="*" />
<PackageReference Include="Microsoft.ML.OnnxRuntime.Gpu.Linux" Version="1.31.1" /></ItemGroup></Project>"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Lay out a library for x86-64 as `make natives` does, and return its file."""
    (tmp_path / "wheels").mkdir()
    shutil.copy(ROOT / "build/natives/linux-x64/libquantmoe_ort.so", tmp_path / "wheels" / NAME)
    natives = [sys.executable, ROOT / "packages/natives.py", "quantmoe_ort_cuda", tmp_path / "wheels"]
    subprocess.run([*natives, tmp_path / "natives"], check=True)
    return tmp_path / "natives/linux-x64" / NAME


@pytest.mark.skipif(not shutil.which("dotnet"), reason="needs dotnet")
@pytest.mark.parametrize("platform", ["", "linux-x64"])
def test_nuget(tmp_path: Path, library: Path, platform: str) -> None:
    """A program gets the library, and ONNX Runtime's for GPUs instead of the one that QuantMoe brings."""
    source = tmp_path / "source"
    natives = [f"-p:Version={VERSION}", f"-p:CudaNatives={library.parents[1]}", "--output", source]
    dotnet(
        "pack", *natives, "--artifacts-path", ROOT / "build/nuget/artifacts", ROOT / "packages/nuget/src/QuantMoe.Cuda"
    )
    with zipfile.ZipFile(source / f"QuantMoe.Cuda.{VERSION}.nupkg") as package:
        assert package.read(f"runtimes/linux-x64/native/{NAME}") == library.read_bytes()
        assert package.read("LICENSE") == (ROOT / "LICENSE").read_bytes()
        nuspec = package.read("QuantMoe.Cuda.nuspec").decode()
        assert f'<dependency id="QuantMoe" version="{VERSION}"' in nuspec
        assert not [name for name in package.namelist() if name.startswith("lib/")]
    with zipfile.ZipFile(source / "Microsoft.ML.OnnxRuntime.Gpu.Linux.1.31.1.nupkg", "w") as package:
        package.writestr("Microsoft.ML.OnnxRuntime.Gpu.Linux.nuspec", GPU_RUNTIME)
        package.writestr("runtimes/linux-x64/native/libonnxruntime.so", b"for GPUs")
    (tmp_path / "App.csproj").write_text(PROJECT.format(dist=ROOT / "dist"), encoding="utf-8")
    program = "System.Console.WriteLine(QuantMoe.Device.Cuda);"
    (tmp_path / "Program.cs").write_text(program, encoding="utf-8")
    dotnet("build", *([f"-p:RuntimeIdentifier={platform}", "-p:SelfContained=false"] if platform else []), tmp_path)
    (app,) = (file.parent for file in tmp_path.glob("bin/**/App.dll"))
    folder = app if platform else app / "runtimes/linux-x64/native"
    assert (folder / NAME).read_bytes() == library.read_bytes()
    assert (folder / "libonnxruntime.so").read_bytes() == b"for GPUs"
    assert (folder / "libquantmoe_ort.so").exists()
    deps = json.loads((app / "App.deps.json").read_text(encoding="utf-8"))
    (target,) = (packages for packages in deps["targets"].values() if packages)
    cpu = json.dumps(next(files for name, files in target.items() if name.startswith("Microsoft.ML.OnnxRuntime/")))
    assert "linux-x64" not in cpu
    assert '"libonnxruntime.so"' not in cpu


@pytest.mark.skipif(not shutil.which("mvn"), reason="needs mvn")
def test_jar(tmp_path: Path, library: Path) -> None:
    """The jar of the classifier has the library where QuantMoE looks for it, and its own name as a module."""
    for part in ("packages/java/pom.xml", "packages/java/src"):
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / part).symlink_to(ROOT / part)
    content = tmp_path / "build/java/cuda/linux-x64"
    shutil.copytree(library.parent, content / "quantmoe/native/linux-x64")
    pom = tmp_path / "packages/java/pom.xml"
    for classifier in ("linux-x86_64-cuda", "linux-aarch64-cuda"):
        subprocess.run(["mvn", "-q", "-B", "-ntp", "-f", pom, f"jar:jar@{classifier}"], check=True)
    (jar,) = (tmp_path / "build/java").glob("*.jar")  # no jar without a library
    assert jar.name == f"quantmoe-{VERSION}-linux-x86_64-cuda.jar"
    with zipfile.ZipFile(jar) as archive:
        assert archive.read(f"quantmoe/native/linux-x64/{NAME}") == library.read_bytes()
        assert b"Automatic-Module-Name: quantmoe.cuda" in archive.read("META-INF/MANIFEST.MF")
