"""Garbage collection in a store: publications that no reader can need are removed.

Only objects written by a publisher of this format are removed: the key and the first bytes, or for a manifest the
content, must say so. Manifests go first, so no manifest names a missing object for long.
"""

from __future__ import annotations

from skyrl_mega.common.safe_read import Malformed, parse_json
from skyrl_mega.weights.files.manifest import FORMAT, KEY, MAGIC
from skyrl_mega.weights.files.store import Absent, Store


def collect(store: Store, publisher: str, first: int) -> int:
    """Removes the publications of `publisher` before number `first`, and everything of other publishers, whose runs
    have ended: a store belongs to one run at a time. Objects not written by a publisher stay. Returns the number of
    removed objects.

    Raises:
        StoreError: The store failed.
    """
    old = [key for key in store.list_keys() if KEY.fullmatch(key) and not _needed(key, publisher, first)]
    removed = 0
    for key in sorted(old, key=lambda key: (not key.endswith(".json"), key)):
        if _ours(store, key):
            store.remove(key)
            removed += 1
    return removed


def _needed(key: str, publisher: str, first: int) -> bool:
    owner, _, rest = key.partition("/")
    return owner == publisher and (rest.startswith("layout-") or int(rest[:9]) >= first)


def _ours(store: Store, key: str) -> bool:
    """Returns True if an object has the content of a file written here; False if it has gone."""
    try:
        if not key.endswith(".json"):
            return store.read(key, 0, len(MAGIC)) == MAGIC
        content = parse_json(store.read(key))
    except (Absent, Malformed):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT
