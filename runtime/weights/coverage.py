from __future__ import annotations

from collections.abc import Iterable

from umbra.runtime.weights.manifest import Manifest


def find_gap(manifest: Manifest, regions: Iterable[tuple[int, int, int | None]]) -> str:
    """The first byte that is missing, sent twice or outside; "" when there is none."""
    ordered = sorted((offset, nbytes) for offset, nbytes, _ in regions if nbytes)
    idx = 0
    for entry in manifest.entries:
        cursor = entry.offset
        while cursor < entry.end:
            if idx == len(ordered) or ordered[idx][0] != cursor:
                found = ordered[idx][0] if idx < len(ordered) else "nothing more"
                return (
                    f"the ranks' shards do not cover tensor {entry.name!r}: expected a region "
                    f"at image byte {cursor}, got {found}; do all ranks publish the same model?"
                )
            cursor += ordered[idx][1]
            idx += 1
        if cursor > entry.end:
            return f"a region reaches byte {cursor}, but tensor {entry.name!r} ends at {entry.end}"
    if idx != len(ordered):
        return f"a region at image byte {ordered[idx][0]} belongs to no tensor"
    return ""
