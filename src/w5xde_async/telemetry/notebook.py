"""How objects show themselves in a notebook: a small HTML table, without script or style of its own."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """``rows`` below ``title``, escaped. Rows whose value is None or "" are left out; http addresses become links."""
    lines = [
        f'<tr><th scope="row">{escape(name)}</th><td>{_cell(value)}</td></tr>'
        for name, value in rows.items()
        if value is not None and value != ""
    ]
    return f"<table><caption>{escape(title)}</caption><tbody>{''.join(lines)}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = escape(str(value), quote=True)
    return f'<a href="{text}">{text}</a>' if text.startswith(("http://", "https://")) else text
