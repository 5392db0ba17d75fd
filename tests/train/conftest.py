"""train/'s scripts import each other by bare names; the tests import them the same way."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "train"))
