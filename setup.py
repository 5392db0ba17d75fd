"""Packages of the overlay. Everything else about the distribution stands in pyproject.toml.

The fork lives inside vLLM's own package, `vllm.model_executor.models.kimi_k3_fast`. The folders above it carry no `__init__.py`:
to setuptools they are namespaces, to Python stock vLLM's regular packages win over them, so nothing of vLLM is shadowed, neither
from a wheel nor from an editable install.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=find_namespace_packages(include=["vllm.model_executor.models.kimi_k3_fast*"]),
    package_data={"": ["*.json", "*.html", "*.diff", "*.jinja"]},
)
