"""A builder for a rank's shard, used by both the Megatron and the vLLM declarations."""

from __future__ import annotations

from collections.abc import Callable

from skyrl_mega.parallel.box import Box, Piece, Shard


class ShardBuilder:
    """A builder of a rank's shard: collects local parameters, and the pieces of global tensors that fill them.

    Args:
        tensors: Name → shape of the global tensors.
        on_disk: Returns the name in `tensors` of a tensor as a block calls it.
    """

    def __init__(
        self, tensors: dict[str, tuple[int, ...]], on_disk: Callable[[str], str] = lambda tensor: tensor
    ) -> None:
        self._tensors, self._on_disk = tensors, on_disk
        self._params: dict[str, tuple[int, ...]] = {}
        self._pieces: list[Piece] = []
        self._boxes: dict[Box, Box] = {}

    def param(self, name: str, *shape: int) -> str:
        """Declares a local parameter of shape `shape`, and returns `name` unchanged. Parameters keep the order of their
        first declaration; a second declaration replaces the shape. The module's tensor may have another shape with the
        same elements in C order (`Shard.params`)."""
        self._params[name] = shape
        return name

    def rows(
        self, param: str, at: int, tensor: str, start: int = 0, count: int | None = None, stack: tuple[int, ...] = ()
    ) -> None:
        """Declares that rows `start … start + count - 1` of `tensor` lie in the parameter from row `at` on.

        Args:
            param: Local parameter, already declared (`param`).
            at: First row in the parameter.
            tensor: The global tensor, as a block calls it.
            start: First row in the tensor.
            count: Number of rows; None: all rows of the tensor.
            stack: Entry of the parameter's leading dimensions, if the parameter has more dimensions than the tensor.

        Raises:
            KeyError: `tensor` is unknown.
        """
        tensor = self._on_disk(tensor)
        shape = self._tensors[tensor]
        zeros = (0,) * (len(shape) - 1)
        box = self._box((start, *zeros), shape if count is None else (count, *shape[1:]))
        self._pieces.append(Piece(tensor, box, param, (*stack, at, *zeros)))

    def columns(self, param: str, tensor: str, start: int, count: int, stack: tuple[int, ...] = ()) -> None:
        """Declares that columns `start … start + count - 1` of a matrix fill the parameter, or with `stack` one entry
        of its leading dimensions. Raises KeyError for an unknown `tensor`."""
        tensor = self._on_disk(tensor)
        rows = self._tensors[tensor][0]
        self._pieces.append(Piece(tensor, self._box((0, start), (rows, count)), param, (*stack, 0, 0)))

    def place(
        self, param: str, offset: tuple[int, ...], tensor: str, start: tuple[int, ...], shape: tuple[int, ...]
    ) -> None:
        """Declares that the box of `tensor` with this start and shape lies at `offset` of the parameter, which has as
        many dimensions as the tensor. The names are not checked."""
        self._pieces.append(Piece(self._on_disk(tensor), self._box(start, shape), param, offset))

    def whole(self, param: str, tensor: str) -> None:
        """Declares a new local parameter with the tensor's shape, filled by the whole tensor. Raises KeyError for an
        unknown `tensor`."""
        self.rows(self.param(param, *self._tensors[self._on_disk(tensor)]), 0, tensor)

    def row_part(self, param: str, tensor: str, start: int, count: int) -> None:
        """Declares a new local parameter, filled by rows `start … start + count - 1` of the tensor. Raises KeyError for
        an unknown `tensor`."""
        self.rows(self.param(param, count, *self._tensors[self._on_disk(tensor)][1:]), 0, tensor, start, count)

    def column_part(self, param: str, tensor: str, start: int, count: int) -> None:
        """Declares a new local parameter, filled by columns `start … start + count - 1` of a matrix. Raises KeyError
        for an unknown `tensor`."""
        self.columns(self.param(param, self._tensors[self._on_disk(tensor)][0], count), tensor, start, count)

    def _box(self, start: tuple[int, ...], shape: tuple[int, ...]) -> Box:
        """Returns the box; equal boxes share an object, since thousands of experts are cut alike."""
        box = Box(start, shape)
        return self._boxes.setdefault(box, box)

    def shard(self) -> Shard:
        """Returns the parameters and pieces declared so far, as a shard."""
        return Shard(self._params, tuple(self._pieces))
