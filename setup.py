"""Builds the native core. WEIGHTSYNC_NATIVE: auto (the default: if that fails, go on without), require, off."""

from __future__ import annotations

import os
import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

MODE = os.environ.get("WEIGHTSYNC_NATIVE", "auto")
FLAGS = ["-std=c++17", "-O3", "-g1", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]


class BuildNative(build_ext):
    """Builds, or says loudly that the slower pure twin will be used."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:  # compilers fail in many ways; each means that there is no native core
            if MODE == "require":
                raise
            text = (
                f"weightsync: THE NATIVE CORE COULD NOT BE BUILT ({error}).\n"
                "Going on with the pure twin: the same results, many times slower. With g++ installed, "
                "WEIGHTSYNC_NATIVE=require pip install shows the cause."
            )
            print(f"\n{'!' * 80}\n{text}\n{'!' * 80}\n", file=sys.stderr)
            self.extensions = []  # otherwise the install step looks for what was not built


def extensions() -> list[Extension]:
    if MODE not in ("auto", "require", "off"):
        raise SystemExit(f"WEIGHTSYNC_NATIVE is {MODE!r}; expected auto, require or off")
    if MODE == "off":
        return []
    import pybind11

    return [
        Extension(
            "weightsync._native._core",
            sources=sorted([*glob("csrc/core/*.cpp"), *glob("csrc/bindings/*.cpp")]),
            depends=[*glob("csrc/core/*.h"), *glob("csrc/bindings/*.h")],
            include_dirs=["csrc/core", pybind11.get_include()],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            language="c++",
        )
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildNative})
