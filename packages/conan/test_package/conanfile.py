"""What `conan create` runs: programs that have the package alone, on the model that QUANTMOE_MODEL names."""

import os
from pathlib import Path

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout


class Consumer(ConanFile):
    """Build consumer.cc against the shared library and against the static one."""

    settings = "os", "arch", "compiler", "build_type"
    generators = "CMakeDeps"

    def requirements(self) -> None:
        """Take the package that was created."""
        self.requires(self.tested_reference_str)

    def layout(self) -> None:
        """Build beside the sources, in folders of Conan's own."""
        cmake_layout(self)

    def generate(self) -> None:
        """Tell CMake where ONNX Runtime is."""
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False  # leaves no file beside the sources
        for name in ("root", "include_dir", "library_dir"):
            if place := self.conf.get(f"user.quantmoe:ort_{name}"):
                toolchain.cache_variables[f"ORT_{name.upper()}"] = place
        toolchain.generate()

    def build(self) -> None:
        """Compile the programs."""
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def test(self) -> None:
        """Run them where a model is named."""
        if can_run(self) and (model := os.environ.get("QUANTMOE_MODEL")):
            for kind in ("ort", "ort_static"):
                self.run(f'"{Path(self.build_folder, f"consumer_{kind}")}" "{model}"', env="conanrun")
