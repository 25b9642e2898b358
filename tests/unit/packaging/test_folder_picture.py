"""docs/folders.svg is the graph of the folders that the imports make.

`python tests/unit/packaging/test_folder_picture.py` draws it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from statistics import fmean
from typing import Final

from test_import_direction import LAYERS, ROOT, all_imports, place_of

PICTURE: Final = ROOT / "docs" / "folders.svg"
COLOURS: Final = {"runtime": "#dbe9f6", "engines": "#fde3cd", "trainer": "#dcf0d9"}
WIDTH: Final = 1160
ROW_HEIGHT: Final = 66
BOX_HEIGHT: Final = 24
CHARACTER_WIDTH: Final = 6.7

Graph = dict[str, set[str]]


def part_imports() -> Graph:
    """part of LAYERS -> the parts that its modules import."""
    graph: Graph = {part: set() for layer in LAYERS for part in layer}
    for module, imported in all_imports():
        part, other = place_of(module)[1], place_of(imported)[1]
        if part != other:
            graph[part].add(other)
    return graph


def without_detours(graph: Graph) -> Graph:
    """Leaves out the arrows between parts that other arrows connect."""
    below: Graph = {}
    for part in TopologicalSorter(graph).static_order():
        below[part] = graph[part].union(*(below[other] for other in graph[part]))
    return {
        part: {o for o in others if not any(o in below[via] for via in others)}
        for part, others in graph.items()
    }


def positions(graph: Graph) -> dict[str, tuple[float, float]]:
    """The centre of each part's box: its row is its layer, near the parts that it imports."""
    found: dict[str, tuple[float, float]] = {}

    def wish(part: str) -> float:
        return fmean([found[other][0] for other in graph[part]] or [WIDTH / 2])

    for idx, layer in enumerate(LAYERS):
        row = sorted(layer, key=lambda part: (wish(part), part))
        gap = (WIDTH - sum(map(box_width, row))) / (len(row) + 1)
        left = gap
        for part in row:
            found[part] = left + box_width(part) / 2, (len(LAYERS) - idx - 0.5) * ROW_HEIGHT
            left += box_width(part) + gap
    return found


def label_of(part: str) -> str:
    return part.replace(".", "/").removeprefix("runtime/")


def box_width(part: str) -> float:
    return CHARACTER_WIDTH * len(label_of(part)) + 14


def lines_of(graph: Graph, at: Mapping[str, tuple[float, float]]) -> list[str]:
    lines: list[str] = []
    for part, (x, y) in at.items():
        for other in sorted(graph[part]):
            (to_x, to_y), middle = at[other], ROW_HEIGHT / 2
            lines.append(
                f'<path d="M{x:.0f} {y + BOX_HEIGHT / 2:.0f}C{x:.0f} {y + middle + 12:.0f} '
                f'{to_x:.0f} {to_y - middle - 12:.0f} {to_x:.0f} {to_y - BOX_HEIGHT / 2:.0f}"/>'
            )
    return lines


def boxes_of(at: Mapping[str, tuple[float, float]]) -> list[str]:
    return [
        f'<rect x="{x - box_width(part) / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" '
        f'width="{box_width(part):.0f}" height="{BOX_HEIGHT}" rx="4" '
        f'fill="{COLOURS[part.split(".")[0]]}"/>'
        f'<text x="{x:.0f}" y="{y + 4:.0f}">{label_of(part)}</text>'
        for part, (x, y) in at.items()
    ]


def picture() -> str:
    graph = without_detours(part_imports())
    at = positions(graph)
    height = len(LAYERS) * ROW_HEIGHT
    parts: Sequence[str] = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" text-anchor="middle">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        '<g fill="none" stroke="#8a97a5">',
        *lines_of(graph, at),
        '</g><g stroke="#6b7785" stroke-width="0.7">',
        *(box.replace("<text", '<text stroke="none"') for box in boxes_of(at)),
        "</g></svg>\n",
    )
    return "\n".join(parts)


def test_the_picture_is_that_of_the_imports() -> None:
    assert PICTURE.read_text() == picture(), f"run: python {__file__}"


if __name__ == "__main__":
    PICTURE.write_text(picture())
