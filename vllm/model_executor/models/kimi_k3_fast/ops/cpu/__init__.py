"""The operators of a decode step as C++ for CPUs, beside the PyTorch forms: `library` loads them, `forms` has the calls.

One library holds every instruction set (portable, AVX2, AVX-512, AVX-512 with BF16) and takes the best that the machine has. It
knows neither Python nor torch: pointers, sizes and strides go through a C ABI. Sources: `csrc/kimi_k3_fast/cpu/`.
"""

from .forms import Buffers, CpuForms, Tape
from .library import LEVELS, available, load

__all__ = ["LEVELS", "Buffers", "CpuForms", "Tape", "available", "load"]
