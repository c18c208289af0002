"""Draws docs/images/rooms.svg: the rooms of the package, one above the other, as tests/meta/test_imports.py holds them.

    python docs/make_rooms.py            # draw it
    python docs/make_rooms.py --check    # exit 1 where it is not current

A room may import those below it.
"""

from __future__ import annotations

import sys
from html import escape
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "w5xde_async"
PICTURE = ROOT / "docs" / "images" / "rooms.svg"
sys.path.insert(0, str(ROOT))

from tests.meta.test_imports import LEVELS  # noqa: E402 - the path has to be there first

WIDTH, ROW, GAP, LABEL = 960, 44, 10, 15
COLOURS = {"coordinator": "#dbe7f6", "hub": "#e3f0dc", "worker": "#f7e6d5"}


def there() -> list[str]:
    """The rooms that exist: of what is to come nothing is drawn."""
    places = {room: SOURCE.joinpath(*room.split(".")) for room in LEVELS}
    return [room for room, place in places.items() if place.is_dir() or place.with_suffix(".py").is_file()]


def drawing() -> str:
    rows = [
        list(rooms) for _, rooms in groupby(sorted(there(), key=lambda room: -LEVELS[room]), key=LEVELS.__getitem__)
    ]
    height = len(rows) * (ROW + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="{LABEL}" role="img">',
        "<title>The rooms of w5xde_async: each may import those below it</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, rooms in enumerate(rows):
        width = (WIDTH - GAP * (len(rooms) + 1)) / len(rooms)
        y = GAP + number * (ROW + GAP)
        for place, room in enumerate(rooms):
            x, middle = GAP + place * (width + GAP), y + ROW / 2 + LABEL / 3
            colour = COLOURS.get(room.split(".")[0], "#eeeeee")
            parts += [
                f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{ROW}" rx="5" fill="{colour}" stroke="#777"/>',
                f'<text x="{x + width / 2:.0f}" y="{middle:.0f}" text-anchor="middle">{escape(room)}</text>',
            ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        current = PICTURE.is_file() and PICTURE.read_text() == drawing()
        if not current:
            sys.stderr.write(f"{PICTURE.name} is not current: python docs/make_rooms.py\n")
        return 0 if current else 1
    PICTURE.write_text(drawing())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
