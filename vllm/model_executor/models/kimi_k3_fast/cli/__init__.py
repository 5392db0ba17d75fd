"""`k3fast`: one thin command for each thing an operator asks of the fork. Every command calls a room; the answers live there."""

from __future__ import annotations


def main() -> None:
    """The console script's entry point."""
    from .app import app

    app()
