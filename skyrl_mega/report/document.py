"""One self-contained HTML page: its style and program inline, its data packed, nothing loaded from anywhere.

What a policy wrote is untrusted. It enters a page either escaped or inside a packed block (base64 has no sign that HTML
knows), and the page's program only ever sets text. A content security policy names the page's own style and program by
their hash; nothing else runs, and nothing is sent.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.whole import whole_file
from skyrl_mega.config.errors import UserError

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
    title: str, body: str, *, styles: Sequence[str], programs: Sequence[str], blocks: Mapping[str, Any] | None = None
) -> str:
    """The page.

    Args:
        title: Plain text.
        body: HTML, with everything that comes from outside escaped.
        styles: Files of `assets/`, behind `common.css`.
        programs: Files of `assets/`, behind `common.js`.
        blocks: Values for the page's program, by name: it unpacks them when it needs them.
    """
    style = "".join(map(_asset, ("common.css", *styles)))
    program = "".join(map(_asset, ("common.js", *programs)))
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(program)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    packed = [
        f'<script type="application/octet-stream" id="{escape(name)}">{pack(value)}</script>\n'
        for name, value in (blocks or {}).items()
    ]
    return PAGE.format(
        policy=policy, title=escape(title), style=style, body=body, blocks="".join(packed), program=program
    )


def save(file: Path, page: str) -> None:
    """Writes a page, which appears whole or not at all.

    Raises:
        UserError: There is no such folder, or it may not be written to; or the file is no page of `document`.
    """
    try:
        with whole_file(file, f"--html {file}", _is_page) as partial:
            partial.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--html {file}: {error.strerror}; allowed: a file in a folder that you may write to"
        ) from error


def _is_page(file: Path) -> bool:
    head, _, _ = PAGE.partition("{policy}")
    with file.open("rb") as opened:
        return opened.read(len(head)) == head.encode()


def pack(value: Any) -> str:
    """JSON, compressed, in base64."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A lone surrogate cannot be written as UTF-8; a "?" stands for it.
    return base64.b64encode(gzip.compress(text.encode(errors="replace"), 6, mtime=0)).decode()


def _asset(name: str) -> str:
    return resources.files("skyrl_mega.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
