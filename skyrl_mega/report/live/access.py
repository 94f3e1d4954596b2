"""Access to the live page: the token, and the limits of requests."""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs

from skyrl_mega.common.errors import UserError

FILE = "page.token"
"""File of the run's folder with the token, readable by the owner alone; Prometheus' `credentials_file`."""
TOKEN = re.compile(r"[\w-]{43}")


def token_of(folder: Path) -> str:
    """Returns the access token of a run's page from `page.token`; without this file, creates a token and the file.

    A resumed run keeps the token, so an open page reconnects. A token readable by other users is replaced.

    Raises:
        UserError: The file is no token written by this user, or cannot be written.
    """
    file = folder / FILE
    try:
        if os.path.lexists(file):
            if (token := _read(file)) is not None:
                return token
            file.unlink()
        token = secrets.token_urlsafe(32)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as opened:
            opened.write(token)
        return token
    except OSError as error:
        raise UserError(f"{file} cannot be used: {error.strerror}", key=file, fix="move it away") from error


def _read(file: Path) -> str | None:
    """Returns the token in a file, or None if the file is readable by others.

    Raises:
        UserError: The file holds something else, or belongs to another user.
    """
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), errors="replace") as opened:
        state = os.fstat(opened.fileno())
        token = opened.read(100)
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.getuid() or not TOKEN.fullmatch(token):
        raise UserError("it is not a token that a run of yours wrote", key=file, fix="move it away")
    return None if state.st_mode & 0o077 else token


class Guard:
    """The check of a request's token: a cookie, `Authorization: Bearer`, or `?token=` in the address.

    Args:
        token: The token.
        port: Port of the page; cookies of a host are shared by all ports, so the cookie's name contains the port.
    """

    def __init__(self, token: str, port: int) -> None:
        self.token, self.cookie = token, f"skyrl_mega_page_{port}"

    def admits(self, headers: Mapping[bytes, bytes]) -> bool:
        """Returns True if a request's headers contain the token: as bearer token or cookie; `?token=` in the address is
        not examined here."""
        authorization = headers.get(b"authorization", b"")
        if hmac.compare_digest(authorization, f"Bearer {self.token}".encode()):
            return True
        try:
            cookie = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(self.cookie)
        except CookieError:
            return False
        return cookie is not None and self._is_token(cookie.value)

    def admits_query(self, query: bytes) -> bool:
        """Returns True if the query of a request's address contains the token (`?token=`)."""
        try:
            values = parse_qs(query.decode("latin-1"), max_num_fields=8).get("token", [])
        except ValueError:  # too many fields
            return False
        return any(map(self._is_token, values))

    def set_cookie(self) -> bytes:
        """Returns the value of `Set-Cookie` for the token; browsers send this cookie only in requests of the page."""
        return f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/".encode()

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(errors="replace"), self.token.encode())


class Allowance:
    """A rate limit (token bucket): `rate` requests per second, and up to `burst` requests at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self.burst = rate, burst
        self._left, self._at = burst, time.monotonic()

    def take(self) -> bool:
        """Returns True and counts a request if the limit allows another request now; else returns False."""
        now = time.monotonic()
        self._left = min(self.burst, self._left + (now - self._at) * self.rate)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
