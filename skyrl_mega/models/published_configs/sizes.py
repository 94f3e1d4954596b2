"""Keys of config.json that every family names alike."""

from __future__ import annotations


def sizes(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> dict[str, int]:
    """Returns the keys of config.json for layers, hidden size, intermediate size (`ffn`), and heads, with the given
    values unchecked, as a new dict."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
