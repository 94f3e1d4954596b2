"""Self-contained HTML pages: style and program inline, data packed, nothing loaded from outside.

The policy's texts are untrusted. They enter a page either escaped or inside a packed block (base64 contains no HTML
character), and the page's program only ever sets text. A content security policy names the page's own style and program
by hash; nothing else runs, and nothing is sent.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.atomic_output import atomic_file
from skyrl_mega.common.errors import UserError

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
{blocks}<script>{program}</script>
</body>
</html>
"""


def document(
    title: str,
    body: str,
    *,
    styles: Sequence[str],
    programs: Sequence[str],
    blocks: Mapping[str, Any] | None = None,
    served: bool = False,
) -> str:
    """Returns a self-contained HTML page: style, program and data inline.

    Args:
        title: Plain text.
        body: HTML, with all outside text escaped.
        styles: Files of `assets/`, added after `common.css`.
        programs: Files of `assets/`, added after `common.js`.
        blocks: Name → JSON value for the page's program, unpacked on demand; None without any.
        served: True for a page with requests to its own server.

    Raises:
        ValueError: A block contains NaN or infinity.
        FileNotFoundError: A style or program is not in `assets/`.
    """
    style = "".join(map(_asset, ("common.css", *styles)))
    program = "".join(map(_asset, ("common.js", *programs)))
    connect = "connect-src 'self'; " if served else ""
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(program)}'; "
        f"{connect}base-uri 'none'; form-action 'none'"
    )
    packed = [
        f'<script type="application/octet-stream" id="{escape(name)}">{pack(value)}</script>\n'
        for name, value in (blocks or {}).items()
    ]
    return PAGE.format(
        policy=policy, title=escape(title), style=style, body=body, blocks="".join(packed), program=program
    )


def table(rows: Iterable[str], heads: Iterable[str] = (), style: str = "settings") -> str:
    """Returns an HTML table inside a `div`; without `heads`, a table without a row of titles.

    Args:
        rows: HTML inside the `<tr>` of each row: `<td>` and `<th>` elements, with all outside text escaped.
        heads: Titles of the columns, as plain text.
        style: Classes of the table.
    """
    head = "".join(f"<th>{escape(title)}</th>" for title in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f"<div class='wide'><table class='{style}'>{f'<thead><tr>{head}</tr></thead>' if head else ''}"
        f"<tbody>{body}</tbody></table></div>"
    )


def save(file: Path, page: str) -> None:
    """Writes a page to a file, as a whole or not at all; replaces an existing file only if it is a page of `document`.

    Raises:
        UserError: The folder is absent or not writable, or the existing file is not a page of `document`.
    """
    try:
        with atomic_file(file, f"--html {file}", _is_page) as partial:
            partial.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{error.strerror}; allowed: a file in a folder that you may write to", key="--html", value=file
        ) from error


def _is_page(file: Path) -> bool:
    head, _, _ = PAGE.partition("{policy}")
    with file.open("rb") as opened:
        return opened.read(len(head)) == head.encode()


def pack(value: Any) -> str:
    """Returns a JSON value as text for a page: gzip-compressed JSON in base64.

    Raises:
        ValueError: The value contains NaN or infinity.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A lone surrogate cannot be written as UTF-8 and becomes "?".
    return base64.b64encode(gzip.compress(text.encode(errors="replace"), 6, mtime=0)).decode()


def _asset(name: str) -> str:
    return resources.files("skyrl_mega.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
