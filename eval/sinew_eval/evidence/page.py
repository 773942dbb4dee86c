"""Self-contained HTML pages: they load no script, font or picture from elsewhere."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# The colours are those of the dashboard (serve/dashboard/page.css). The reader's browser chooses light or dark.
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #59636e; --line: #d1d9e0; --box: #f6f8fa;
  --bad: #b42318; --good: #116329; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --faint: #9aa4af; --line: #30363d;
  --box: #161b22; --bad: #ff8a80; --good: #7ee787; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 0 1rem 3rem; font: 15px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.4rem; margin: 1rem 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem; }
p { margin: .3rem 0; }
.note, figcaption, dt, th { color: var(--faint); font-size: .88rem; font-weight: 400; }
.good { color: var(--good); } .bad { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap;
  vertical-align: top; }
th.number, td.number { text-align: right; }
tr.best td { font-weight: 600; }
.films { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(min(300px, 100%), 1fr)); }
figure { margin: 0; padding: .5rem; background: var(--box); border: 1px solid var(--line); border-radius: 6px; }
figure img { display: block; width: 100%; height: auto; background: #777; }
pre { overflow-x: auto; padding: .6rem .8rem; margin: .4rem 0; background: var(--box); border: 1px solid var(--line);
  border-radius: 6px; }
code { font: 13px/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: .15rem 1rem; margin: .4rem 0; }
dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; padding: .3rem 0; }
""".strip()
# Content security policy: the browser loads only data that is inside the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
RECORD = "sinew-record"  # id of the HTML element that contains the record as JSON
_RECORD = re.compile(rf'<script type="application/json" id="{RECORD}">(.*?)</script>', re.DOTALL)

_WEBP = r"data:image/webp;base64,[A-Za-z0-9+/=]+"
# Matches the films of one scene and no other markup. These films are copied from a page of unknown origin into
# a new page.
FILMS = re.compile(
    rf'<h2>Scene \d+</h2><div class="films">(?:<figure><picture><source media="[^"<>]*" srcset="{_WEBP}"><img alt="'
    rf'[^"<>]*" src="{_WEBP}"></picture><figcaption>[^<>]*<span class="(?:good|bad)">[a-z ]*</span>[^<>]*</figcaption>'
    r"</figure>)+</div>"
)

Cell = str | tuple[str, str]  # a text, or a text and its CSS class


def page(title: str, parts: Iterable[str], record: Mapping[str, Any]) -> str:
    """Return an HTML page.

    Args:
        title: Title of the page.
        parts: Markup of the body.
        record: JSON object inside the page, which programs read with :func:`record_in`.
    """
    data = json.dumps(record, separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\u0021--")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(title)}</title>",
            f"<style>{STYLE}</style></head>",
            f"<body><h1>{text(title)}</h1>",
            *parts,
            f'<script type="application/json" id="{RECORD}">{data}</script>',
            "</body></html>",
            "",
        ]
    )


def record_in(markup: str) -> str | None:
    """Return the JSON text of a page's record. None if the page contains none."""
    match = _RECORD.search(markup)
    return None if match is None else match[1]


def webp(data: bytes) -> str:
    """Return a data URL with the bytes of a WebP picture."""
    return "data:image/webp;base64," + base64.b64encode(data).decode()


def text(value: object) -> str:
    return html.escape(str(value))


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], best: int = -1) -> str:
    """Return an HTML table.

    Args:
        columns: Names of the columns. A name that begins with ``>`` marks a column of numbers.
        rows: The cells.
        best: Index of the highlighted row. -1 for none.
    """
    number = [' class="number"' if name.startswith(">") else "" for name in columns]
    head = "".join(
        f'<th scope="col"{kind}>{text(name.removeprefix(">"))}</th>'
        for name, kind in zip(columns, number, strict=True)
    )
    body = []
    for index, row in enumerate(rows):
        cells = []
        for cell, right in zip(row, number, strict=True):
            shown, kind = cell if isinstance(cell, tuple) else (cell, "")
            kinds = " ".join(filter(None, (kind, "number" if right else "")))
            attribute = f' class="{kinds}"' if kinds else ""
            cells.append(f"<td{attribute}>{text(shown)}</td>")
        mark = ' class="best"' if index == best else ""
        body.append(f"<tr{mark}>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def facts(rows: Iterable[tuple[str, object]]) -> str:
    """Return an HTML list of names and values. Empty values are left out."""
    items = "".join(
        f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in rows if value not in ("", None)
    )
    return f"<dl>{items}</dl>"


def commands(lines: Iterable[str]) -> str:
    return f"<pre><code>{text(chr(10).join(lines))}</code></pre>"


def folded(summary: str, inner: str) -> str:
    return f"<details><summary>{text(summary)}</summary>{inner}</details>"
