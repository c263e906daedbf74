"""The optional C++ kernels: built where there is a compiler, left out where there is none."""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

SOURCES = Path("src/mgk/csrc")
# Set when wheels are built for others: a failing compiler is then an error.
REQUIRED_VARIABLE = "MGK_REQUIRE_KERNELS"


class PlatformWheel(bdist_wheel):
    """One wheel for every Python on a platform: the kernels use no symbol of Python and are loaded with ctypes."""

    def finalize_options(self) -> None:
        """A folder of a platform, on Windows too, where there are no kernels."""
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-PLATFORM."""
        return "py3", "none", super().get_tag()[2]


def kernels() -> list[Extension]:
    """A shared library, loaded with ctypes: without Python and PyTorch headers one build fits every version."""
    if sys.platform == "win32":  # the kernels use the vector extensions of GCC and Clang
        return []
    return [
        Extension(
            "mgk._kernels",
            sources=[path.as_posix() for path in sorted(SOURCES.glob("*.cpp"))],
            depends=[path.as_posix() for path in sorted(SOURCES.glob("*.h"))],
            language="c++",
            extra_compile_args=[
                "-std=gnu++17",
                "-O3",
                "-g0",  # Python's own flags ask for debugging symbols, five times the size
                "-fno-tree-slp-vectorize",  # vectors are written out, and GCC 12 crashes when it looks for more
                "-fvisibility=hidden",
                "-pthread",
                "-Wno-psabi",
                "-Wno-maybe-uninitialized",  # in GCC's own AVX-512 header
            ],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=not os.environ.get(REQUIRED_VARIABLE),
        )
    ]


setup(ext_modules=kernels(), cmdclass={"bdist_wheel": PlatformWheel})
