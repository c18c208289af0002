"""Every relative link of the repository's documents leads to a file; says which do not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def broken_links(document: Path) -> list[str]:
    targets = LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8")))
    local = (target.partition("#")[0] for target in targets if "://" not in target and not target.startswith("mailto:"))
    return [target for target in local if target and not (document.parent / target).exists()]


def main() -> int:
    documents = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")])
    broken = [f"{document.relative_to(ROOT)}: {target}" for document in documents for target in broken_links(document)]
    lines = [f"{len(documents)} documents, {len(broken)} broken links", *broken]
    sys.stdout.write("\n".join(lines) + "\n")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
