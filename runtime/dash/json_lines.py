from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Final, cast

_CONSTANT: Final = re.compile(r"NaN|Infinity")


class JsonLines:
    """Reads a JSON Lines file as it grows: each line once. A file that was replaced is read
    from its beginning."""

    def __init__(self, path: Path, keys: tuple[str, ...] = ()) -> None:
        self.rows: list[dict[str, Any]] = []  # the `keys` of each object
        self.encoded: list[str] = []  # whole objects as text; NaN is null
        self.times_replaced = 0  # changes when the rows are those of another file
        self._path = path
        self._keys = keys
        self._inode = 0
        self._offset = 0

    def read_on(self) -> None:
        """A missing file has no lines."""
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._begin(stat.st_ino)
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self._add(line)
        except FileNotFoundError:
            self._begin(0)

    def _add(self, line: bytes) -> None:
        try:
            text = line.decode().strip()
            row: Any = json.loads(text, parse_constant=lambda _: None)
        except ValueError:
            return
        if isinstance(row, dict):
            found = cast("dict[str, Any]", row)
            self.rows.append({key: found[key] for key in self._keys if key in found})
            self.encoded.append(json.dumps(found) if _CONSTANT.search(text) else text)

    def _begin(self, inode: int) -> None:
        if self._offset:
            self.times_replaced += 1
        self.rows, self.encoded, self._inode, self._offset = [], [], inode, 0
