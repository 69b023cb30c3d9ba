"""The Conan recipe: conan create . builds a package from this checkout.

Without network, with the system's nlohmann-json and Eigen (Debian: nlohmann-json3-dev, libeigen3-dev):
conan create . --profile:all=packaging/conan/system --test-folder=packaging/conan/test_package.
"""

import os
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load, rmdir


class LadonConan(ConanFile):
    name = "ladon"
    description = "Attention: MHA, GQA, MQA and MLA, with gradients and caches"
    license = "Apache-2.0"
    topics = ("attention", "transformer", "kv-cache")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False], "convert": [True, False]}
    default_options = {"shared": False, "convert": True}
    exports_sources = "CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "src/*"

    def set_version(self):
        text = load(self, os.path.join(self.recipe_folder, "CMakeLists.txt"))
        self.version = re.search(r"project\(ladon VERSION ([0-9.]+)", text).group(1)

    def validate(self):
        check_min_cppstd(self, 20)
        if self.settings.os != "Linux" or self.settings.arch != "x86_64":
            raise ConanInvalidConfiguration("ladon runs on x86-64 Linux")

    def requirements(self):
        # Used inside the library alone: its headers and its users do not see them.
        self.requires("nlohmann_json/[>=3.10 <4]", visible=False)
        if self.options.convert:
            self.requires("eigen/[>=3.4 <4]", visible=False)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["CMAKE_INSTALL_LIBDIR"] = "lib"
        toolchain.cache_variables["LADON_CONVERT"] = "ON" if self.options.convert else "OFF"
        toolchain.cache_variables["LADON_CUDA"] = "OFF"
        for part in ("TESTS", "CLI", "EXAMPLES", "PYTHON"):
            toolchain.cache_variables[f"LADON_{part}"] = False
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        rmdir(self, os.path.join(self.package_folder, "share"))

    def package_info(self):
        # The package's own files for CMake and pkg-config are right wherever it lies.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("lib", "cmake", "ladon")]
        self.cpp_info.libs = ["ladon"]
        self.cpp_info.system_libs = ["pthread"]
