"""Which rows `prefetch` asks for, counted one by one. It changes no tensor, so there is nothing else to compare."""

from __future__ import annotations

from . import Config


def rows(config: Config) -> list[int]:
    """The first `first` of every `every` rows, in order."""
    return [row for row in range(config.rows) if row % config.every < config.first]
