"""Where the fast path is allowed: plain facts of a deployment, and the pure rules that refuse it, all of which are asked."""

from .deployment import Deployment
from .rules import refusals

__all__ = ["Deployment", "refusals"]
