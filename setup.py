"""Packages of the overlay and its CPU library. Everything else about the distribution stands in pyproject.toml.

The fork lives inside vLLM's own package, `vllm.model_executor.models.kimi_k3_fast`. The folders above it carry no `__init__.py`:
to setuptools they are namespaces, to Python stock vLLM's regular packages win over them, so nothing of vLLM is shadowed, neither
from a wheel nor from an editable install.

The library is C++ behind a plain C ABI: it serves every Python and torch. Where it cannot be built, the package installs without
it and says why; the PyTorch form of each operator serves then, and the guard reports that it does.
"""

import importlib.util
import subprocess
from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
CPU_SOURCES = ROOT / "csrc/kimi_k3_fast/cpu"


class BuildLibrary(build_ext):
    """Builds the CPU library with its own script, since each instruction set has its own flags."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # no Python version in the name: it is no Python module

    def build_extension(self, ext: Extension) -> None:
        spec = importlib.util.spec_from_file_location("build_cpu", CPU_SOURCES / "build.py")
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        try:
            script.build(Path(self.get_ext_fullpath(ext.name)).absolute())
        except (OSError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", None) or error
            print(f"vllm-kimi-k3-fast: no CPU kernels, the PyTorch forms serve instead. The C++ compiler said: {detail}")

    def copy_extensions_to_source(self) -> None:
        if Path(self.build_lib, self.get_ext_filename(self.extensions[0].name)).exists():
            super().copy_extensions_to_source()


class Wheel(bdist_wheel):
    """Bound to a platform, to no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    packages=find_namespace_packages(include=["vllm.model_executor.models.kimi_k3_fast*"]),
    package_data={"": ["*.json", "*.html", "*.diff", "*.jinja"]},
    ext_modules=[
        Extension(
            "vllm.model_executor.models.kimi_k3_fast.ops.cpu.kernels",
            [str(file.relative_to(ROOT)) for file in sorted(CPU_SOURCES.glob("*.cpp"))],
            depends=[str(file.relative_to(ROOT)) for file in sorted(CPU_SOURCES.glob("*.h"))],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
)
