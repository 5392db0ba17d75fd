"""The event file: JSON lines, written by a thread of its own, rotated by size, never in the way of a step.

A full or missing disk costs nothing but lines: they are counted as lost, kept back up to a bound, and written when the disk
is back. Each rotated-in file begins with a `carry` event that sums up everything before it, so that the files that remain add
up to the report.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .totals import Totals

WAITING_LINES = 4096


class EventLog:
    """One rank's event file. An empty `path` keeps nothing.

    `path` is a file name; the rank's name is put before its suffix (`events.jsonl` -> `events.rank0.jsonl`), rotated
    files get `.1`, `.2`, ... with the highest number the oldest.
    """

    def __init__(self, path: str, rank: str, max_bytes: int, keep: int, open_file: Callable[..., Any] = open) -> None:
        base = Path(path)
        self.path = base.with_name(f"{base.stem}.{rank}{base.suffix or '.jsonl'}") if path else None
        self.max_bytes, self.keep = max_bytes, keep
        self.lost = 0  # events that no file will ever hold
        self.errors = 0  # failed attempts to write
        self.healthy = True  # the last attempt did not fail
        self.last_error = ""
        self._open_file = open_file
        self._waiting: deque[dict[str, Any]] = deque()
        self._written = Totals()
        self._size = 0
        self._failed = False
        self._file: Any = None
        self._wake = threading.Condition()
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def write(self, event: dict[str, Any]) -> None:
        """Hand one event to the writer. Never blocks on the disk, never raises."""
        if self.path is None:
            return
        with self._wake:
            if len(self._waiting) >= WAITING_LINES:
                self._waiting.popleft()
                self.lost += 1
            self._waiting.append(event)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="k3fast-events", daemon=True)
                self._thread.start()
            self._wake.notify()

    def drain(self, timeout: float = 5.0) -> bool:
        """Wait until every event handed in was written (or the disk refused it); True if nothing waits any more."""
        with self._wake:
            self._wake.notify()
            self._wake.wait_for(lambda: not self._waiting and not self._busy, timeout)
            return not self._waiting and not self._busy

    def close(self) -> None:
        """Write what waits and stop the thread."""
        self.drain()
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def files(self) -> list[Path]:
        """The files that exist, oldest first."""
        if self.path is None:
            return []
        old = [self.path.with_name(f"{self.path.name}.{n}") for n in range(self.keep, 0, -1)]
        return [p for p in (*old, self.path) if p.exists()]

    def state(self) -> dict[str, Any]:
        return {
            "path": str(self.path or ""),
            "waiting": len(self._waiting),
            "lost": self.lost,
            "write_errors": self.errors,
            "last_error": self.last_error,
        }

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closed)
                if self._closed and not self._waiting:
                    break
                batch = list(self._waiting)
                self._waiting.clear()
                self._busy = True
            done = 0
            try:
                for event in batch:
                    self._put(event)
                    done += 1
                self.healthy = True
            except OSError as error:
                self.errors += 1
                self.healthy = False
                self.last_error = str(error)
                self._failed = True
                self._file = None
            with self._wake:
                self._busy = False
                rest = batch[done:]
                room = WAITING_LINES - len(self._waiting)
                self.lost += max(0, len(rest) - room)
                self._waiting.extendleft(reversed(rest[-room:] if room > 0 else []))
                self._wake.notify_all()
                if rest:
                    if self._closed:
                        break
                    self._wake.wait(1.0)  # let the disk recover before the next attempt
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _put(self, event: dict[str, Any]) -> None:
        """Append one line whole or not at all."""
        line = json.dumps(event, separators=(",", ":"), default=str) + "\n"
        if self._file is None or self._size + len(line) > self.max_bytes:
            self._open_next()
        self._append(line)
        self._written.apply(json.loads(line))

    def _append(self, line: str) -> None:
        assert self.path is not None
        data = line.encode("ascii")
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, "short write")
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, self._size)
            raise
        self._size += len(data)

    def _open_next(self) -> None:
        """Open the file anew: the same one after an error, otherwise an empty one, older files moved up."""
        assert self.path is not None
        if self._file is not None:
            self._file.close()
            self._file = None
        again = self._failed and self._size > 0
        self._failed = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not again:
            if self.path.exists() and self.path.stat().st_size:
                self._shift()
            self._size = 0
        self._file = self._open_file(self.path, "ab", buffering=0)
        if not again and self._written.start:
            carry = {"kind": "carry", "t": 0, "totals": self._written.carry()}
            self._append(json.dumps(carry, separators=(",", ":")) + "\n")

    def _shift(self) -> None:
        assert self.path is not None
        for n in range(self.keep, 0, -1):
            source = self.path if n == 1 else self.path.with_name(f"{self.path.name}.{n - 1}")
            if source.exists():
                source.replace(self.path.with_name(f"{self.path.name}.{n}"))
        if self.keep == 0:
            self.path.unlink(missing_ok=True)
