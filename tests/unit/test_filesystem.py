"""What a disk's refusals mean to a person."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from w5xde_async.store.filesystem import explain


def test_what_stands_in_the_way_is_what_is_found_there(tmp_path: Path) -> None:
    folder, file, nowhere, source = (tmp_path / name for name in ("folder", "file", "nowhere", "source"))
    (folder / "x").mkdir(parents=True)
    file.write_text("")
    source.write_text("")
    nowhere.symlink_to("gone")

    def said(fails: Callable[[], object]) -> str:
        with pytest.raises(OSError) as caught:  # noqa: PT011
            fails()
        return explain(caught.value)

    moved = "; move it away, or choose another --run-dir"
    for fails in (lambda: nowhere.mkdir(), lambda: (nowhere / "x").write_text("")):
        link = f"a symbolic link that leads nowhere stands where a file or a directory is needed ({nowhere})"
        assert said(fails) == link + moved
    assert said(folder.mkdir) == f"a directory of this name is there already ({folder})" + moved
    for fails in (file.mkdir, (file / "x").mkdir, lambda: folder.replace(file)):
        assert said(fails) == f"a file stands where a directory is needed ({file})" + moved
    for fails in (lambda: folder.write_text(""), lambda: source.replace(folder)):
        assert said(fails) == f"a directory stands where a file is needed ({folder})" + moved
    assert said(lambda: (file / "x").replace(folder)) == "a file stands where a directory is needed" + moved
    assert said(lambda: (folder / "y" / "z").write_text("")) == "No such file or directory"
