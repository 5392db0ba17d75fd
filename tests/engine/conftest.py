"""The engine's tests measure tokens against the float64 model of the model's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))  # for `reference`
