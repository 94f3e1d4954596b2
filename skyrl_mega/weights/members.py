"""Kinds of engines by the way in which they take new weights (`engines.base.Facts.weights`)."""

from __future__ import annotations

GROUP = "group"
"""Engines whose workers join the process group of a weight sync (`Engine.connect_weights`)."""
FILES = "files"
"""Engines whose workers read the boxes of their shards from a store of weight files (`Engine.fetch_weights`)."""
DIRECTORY = "directory"
"""Engines that load a whole Hugging Face directory (`Engine.fetch_weights`)."""
KINDS = (GROUP, FILES, DIRECTORY)
"""All kinds."""
