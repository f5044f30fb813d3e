"""Conan's recipe: `conan create packages/conan -c user.quantmoe:ort_root=FOLDER`, with ONNX Runtime unpacked there."""

import re
from pathlib import Path

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain
from conan.tools.files import copy, load

ROOT = "../.."
SOURCES = ("CMakeLists.txt", "LICENSE", "THIRD_PARTY_NOTICES.txt", "custom_ops/*", "ort_ext/*", "packages/cpp/*")
TEXT = "packages/rust/text/include/*"


class QuantMoE(ConanFile):
    """The operators for ONNX Runtime, shared and static, with the headers of packages/cpp."""

    name = "quantmoe"
    description = "Quantized mixture-of-experts models in ONNX Runtime"
    license = "Apache-2.0"
    topics = ("onnx", "onnxruntime", "moe", "llm", "quantization")
    package_type = "unknown"  # both kinds of library
    settings = "os", "arch", "compiler", "build_type"

    def set_version(self) -> None:
        """Take the version of CMakeLists.txt."""
        text = load(self, str(Path(self.recipe_folder, ROOT, "CMakeLists.txt")))
        (self.version,) = re.findall(r"project\(quantmoe VERSION (\S+)", text)

    def export_sources(self) -> None:
        """Take what the library is built from."""
        for pattern in (*SOURCES, TEXT):
            copy(
                self,
                pattern,
                str(Path(self.recipe_folder, ROOT)),
                self.export_sources_folder,
                excludes=("*.so", "*.py"),
            )

    def validate(self) -> None:
        """Refuse an older C++."""
        check_min_cppstd(self, 20)

    def generate(self) -> None:
        """Tell CMake where ONNX Runtime's headers are."""
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False  # leaves no file beside the sources
        if root := self.conf.get("user.quantmoe:ort_root"):
            toolchain.cache_variables["ORT_ROOT"] = root
        toolchain.generate()
        CMakeDeps(self).generate()

    def build(self) -> None:
        """Compile both libraries."""
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self) -> None:
        """Install them."""
        CMake(self).install()

    def package_info(self) -> None:
        """Leave find_package to quantmoeConfig.cmake."""
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["lib/cmake/quantmoe"]
        self.cpp_info.libs = ["quantmoe_ort"]
        self.cpp_info.defines = ["QUANTMOE_LINKED"]
