"""Writes safetensors files without torch or safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_weight_file(file: Path, tensors: Mapping[str, bytes]) -> None:
    """One-dimensional tensors of bytes, by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, values in tensors.items():
        end = start + len(values)
        header[name] = {"dtype": "U8", "shape": [len(values)], "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))
