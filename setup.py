"""The optional C++ kernels: built where there is a compiler, left out where there is none."""

import sys
from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("src/mgk/csrc")


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
                "-fno-tree-slp-vectorize",  # vectors are written out, and GCC 12 crashes when it looks for more
                "-fvisibility=hidden",
                "-pthread",
                "-Wno-psabi",
                "-Wno-maybe-uninitialized",  # in GCC's own AVX-512 header
            ],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
        )
    ]


setup(ext_modules=kernels())
