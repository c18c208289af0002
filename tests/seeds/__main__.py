"""The counts of ``items.txt``: by document, by migration page, of all. ``--items`` lists them too."""

from __future__ import annotations

import sys

from tests.seeds.items import counted, items, missing


def main() -> int:
    found = items()
    lines, wrong = [], 0
    for document in dict.fromkeys(item.document for item in found):
        own = [item for item in found if item.document == document]
        lines.append(f"{document}: {counted(own)}")
        for item in own:
            why = missing(item)
            wrong += bool(why)
            if why or "--items" in sys.argv:
                lines.append(
                    f"  {item.line:>4} {item.what}: {item.state}, {item.how}{' NOT SHOWN: ' if why else ''}{why}"
                )
    pages = dict.fromkeys(item.page for item in found)
    lines += [f"docs/{page}: {counted([item for item in found if item.page == page])}" for page in pages]
    lines.append(f"all: {counted(found)}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
