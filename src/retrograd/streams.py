"""A stream is a tensor or any tree of tensors: dicts, lists, tuples, named tuples, dataclasses registered as a pytree.

The engine works on the flat list of a stream's tensors; `fn` sees the tree. This is the only file that knows torch's
pytree, which has no public name yet (tests/test_streams.py fails when it moves).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")

Stream = Any
"""A tensor, or a tree of tensors."""

Structure = pytree.TreeSpec | None
"""The shape of the tree; None for a plain tensor."""


def flatten(stream: Stream) -> tuple[list[Tensor], Structure]:
    """The tensors of a stream, in order, and its structure. A leaf that is no tensor is a TypeError."""
    if isinstance(stream, Tensor):
        return [stream], None
    leaves, structure = pytree.tree_flatten(stream)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"a stream is a tensor or a tree of tensors; this one holds a {type(leaf).__name__}")
    return leaves, structure


def flatten_like(stream: Stream, structure: Structure) -> list[Tensor]:
    """The tensors of a stream that must have this structure (dictionaries in any order), or a ValueError."""
    leaves = [stream] if structure is None else structure.flatten_up_to(stream)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ValueError(f"expected a tensor, got a {type(leaf).__name__}")
    return leaves


def unflatten(leaves: list[Tensor], structure: Structure) -> Stream:
    """The stream of this structure that holds these tensors."""
    return leaves[0] if structure is None else pytree.tree_unflatten(leaves, structure)


def leaves_of(tree: Any, kind: type[T]) -> list[T]:
    """Every leaf of this type in an arbitrary tree; whatever else it holds is passed over."""
    if isinstance(tree, kind):
        return [tree]
    if tree is None or isinstance(tree, (Tensor, str, int, float)):
        return []
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, kind)]


def version(tensor: Tensor) -> int | None:
    """The version counter; None for inference tensors, which have none and cannot be saved for a backward."""
    return None if tensor.is_inference() else tensor._version


counter: Callable[[Tensor], int] = operator.attrgetter("_version")
"""The version counter of a tensor that is known to have one."""


def versions(tensors: Sequence[Tensor]) -> list[int | None]:
    """The version counters of many tensors."""
    try:
        return list(map(counter, tensors))
    except RuntimeError:  # inference tensors among them
        return [version(tensor) for tensor in tensors]


def is_dense(tensor: Tensor) -> bool:
    """Whether it has no gaps and overlaps, as what is computed from it."""
    return tensor.layout is not torch.strided or tensor.stride() == torch.empty_like(tensor, device="meta").stride()


def dense(tensor: Tensor) -> Tensor:
    """The same values without gaps and overlaps."""
    return tensor if is_dense(tensor) else tensor.clone()


def laid_out(tensor: Tensor, model: Tensor) -> Tensor:
    """The same values, laid out as a dense `model`."""
    if tensor.layout is not torch.strided or tensor.stride() == model.stride():
        return tensor
    return torch.empty_like(model).copy_(tensor)


def copied(tree: Any) -> Any:
    """The same in lists, dicts and sets of its own: what can be emptied."""
    if type(tree) in (list, set):
        return type(tree)(map(copied, tree))
    return {key: copied(value) for key, value in tree.items()} if type(tree) is dict else tree


def map_tensors(function: Callable[..., Tensor], *streams: Stream) -> Stream:
    """The stream that `function` makes of streams of one structure, tensor by tensor.

    >>> map_tensors(torch.add, {"x": torch.ones(1)}, {"x": torch.ones(1)})
    {'x': tensor([2.])}
    """
    return pytree.tree_map(function, *streams)


def halve(stream: Stream, dim: int) -> tuple[Stream, Stream]:
    """Both halves of every tensor along one dimension. An odd size is a ValueError."""
    leaves, structure = flatten(stream)
    pairs = []
    for leaf in leaves:
        if not -leaf.dim() <= dim < leaf.dim():
            raise ValueError(f"split={dim}: a tensor of shape {tuple(leaf.shape)} has no dimension {dim}")
        if leaf.shape[dim] % 2:
            raise ValueError(
                f"split={dim}: size {leaf.shape[dim]} of dimension {dim} is odd and cannot be halved "
                f"(shape {tuple(leaf.shape)}); pad it, or use split='duplicate'"
            )
        pairs.append(leaf.chunk(2, dim))
    first, second = ([pair[i] for pair in pairs] for i in (0, 1))
    return unflatten(first, structure), unflatten(second, structure)


def concat(first: Stream, second: Stream, dim: int) -> Stream:
    """Two halves put together again."""
    return map_tensors(lambda a, b: torch.cat((a, b), dim), first, second)


def mean(first: Stream, second: Stream) -> Stream:
    """The mean of two streams."""
    return map_tensors(lambda a, b: (a + b) / 2, first, second)


def total(first: Stream, second: Stream) -> Stream:
    """The sum of two streams."""
    return map_tensors(torch.add, first, second)
