"""Where the Hugging Face tensors lie in the tensors of a distributed checkpoint.

megatron-core stores a parameter under a key that knows nothing of the layout: the whole tensor, as one rank without
any parallelism would hold it (the vocabulary keeps the padding of the layout that saved it). So the boxes are that
rank's; only names differ. Experts share a key and are stacked in it, and so are the layers of a model whose layers
are all alike.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from skyrl_mega.config.errors import UserError
from skyrl_mega.layout.box import Shard
from skyrl_mega.layout.parallel import Parallel
from skyrl_mega.models import megatron
from skyrl_mega.models.decoder import Decoder

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")


def shard(d: Decoder, keys: Collection[str]) -> Shard:
    """The checkpoint as one shard: its parameters are keys, of the shape that the model makes them.

    Args:
        d: the model.
        keys: those that the checkpoint has; they tell which spec saved it, and whether layers are stacked.

    Raises:
        UserError: a key of the model is not there.
    """
    one = megatron.shard(d, Parallel(), 0, "te")
    places = {param: _place(d, param.partition(".")[2], keys) for param in one.params}
    params = {key: sizes + one.params[param] for param, (key, _, sizes) in places.items()}
    pieces = []
    for piece in one.pieces:
        key, stack, _ = places[piece.param]
        pieces.append(replace(piece, param=key, offset=stack + piece.offset))
    return Shard(params, tuple(pieces))


def _place(d: Decoder, name: str, keys: Collection[str]) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Key of a parameter, its place in the key's leading dimensions, and how long those are."""
    found = _LAYER.fullmatch(name)
    if not found:
        if name in keys:
            return name, (), ()
        raise _missing(name)
    layer, rest = int(found[1]), found[2]
    stack: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    if expert := _EXPERT.fullmatch(rest):
        assert d.experts is not None
        rest, stack, sizes = f"mlp.experts.experts.{expert[1]}.weight", (int(expert[2]),), (d.experts.count,)
    # The local spec stores the norm before experts under the name that Transformer Engine has before a dense layer.
    names = [rest, "mlp.linear_fc1.layer_norm_weight"] if rest == "pre_mlp_layernorm.weight" else [rest]
    for rest in names:
        if (key := f"decoder.layers.{layer}.{rest}") in keys:
            return key, stack, sizes
        if (key := f"decoder.layers.{rest}") in keys:
            return key, (layer, *stack), (d.layers, *sizes)
    raise _missing(f"decoder.layers.{layer}.{names[0]}")


def _missing(name: str) -> UserError:
    return UserError(f"the checkpoint has no {name}; it is of another model than config.json describes")
