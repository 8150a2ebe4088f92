"""A stream is any tree of tensors; and the private names of torch on which that rests."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from retrograd import streams as trees

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Molecule:
    x: Any
    y: Any


@dataclass
class Unregistered:
    x: Any


pytree.register_dataclass(Molecule)

X, Y = torch.arange(4.0).view(1, 4), torch.arange(6.0).view(3, 2)
TREES: dict[str, Any] = {
    "dict": {"x": X, "y": Y},
    "ordered dict": OrderedDict(x=X, y=Y),
    "list": [X, Y],
    "tuple": (X, Y),
    "namedtuple": Point(X, Y),
    "dataclass": Molecule(X, Y),
    "nested": {"deep": [X, (Point(Y, {}),)]},
}
of_each_kind = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)


@of_each_kind
def test_flatten_and_back(tree: Any) -> None:
    leaves, structure = trees.flatten(tree)
    assert [id(leaf) for leaf in leaves] == [id(X), id(Y)]
    again = trees.unflatten(leaves, structure)
    assert type(again) is type(tree)
    assert pytree.tree_structure(again) == pytree.tree_structure(tree)


def test_a_tensor_needs_no_structure() -> None:
    assert trees.flatten(X) == ([X], None)
    assert trees.unflatten([X], None) is X
    assert trees.flatten_like(X, None) == [X]


def test_a_stream_may_be_empty() -> None:
    leaves, structure = trees.flatten({})
    assert leaves == []
    assert trees.unflatten([], structure) == {}


@pytest.mark.parametrize(
    ("tree", "kind"),
    [({"x": 1.0}, "float"), ([X, None], "NoneType"), ("text", "str"), (Unregistered(X), "Unregistered")],
)
def test_a_leaf_that_is_no_tensor(tree: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"a stream is a tensor or a tree of tensors; this one holds a {kind}"):
        trees.flatten(tree)


@of_each_kind
def test_flatten_like_itself(tree: Any) -> None:
    leaves = trees.flatten_like(tree, trees.flatten(tree)[1])
    assert [id(leaf) for leaf in leaves] == [id(X), id(Y)]


def test_flatten_like_a_tensor_refuses_a_tree() -> None:
    with pytest.raises(ValueError, match="expected a tensor, got a dict"):
        trees.flatten_like({"x": X}, None)


@of_each_kind
def test_map_tensors(tree: Any) -> None:
    doubled = trees.map_tensors(torch.add, tree, tree)
    assert type(doubled) is type(tree)
    torch.testing.assert_close(trees.flatten(doubled)[0], [2 * X, 2 * Y])


def test_map_tensors_of_other_structures_is_refused() -> None:
    with pytest.raises(ValueError, match="mismatch"):
        trees.map_tensors(torch.add, {"x": X}, {"y": X})


@pytest.mark.parametrize("dim", [1, -1])
@of_each_kind
def test_halves(tree: Any, dim: int) -> None:
    first, second = trees.halve(tree, dim)
    assert type(first) is type(second) is type(tree)
    assert [leaf.tolist() for leaf in trees.flatten(first)[0]] == [X[:, :2].tolist(), Y[:, :1].tolist()]
    assert [leaf.tolist() for leaf in trees.flatten(second)[0]] == [X[:, 2:].tolist(), Y[:, 1:].tolist()]
    together = trees.concat(first, second, dim)
    assert type(together) is type(tree)
    torch.testing.assert_close(trees.flatten(together)[0], [X, Y])


@of_each_kind
def test_mean_and_total(tree: Any) -> None:
    other = trees.map_tensors(lambda leaf: leaf + 2, tree)
    torch.testing.assert_close(trees.flatten(trees.mean(tree, other))[0], [X + 1, Y + 1])
    torch.testing.assert_close(trees.flatten(trees.total(tree, other))[0], [2 * X + 2, 2 * Y + 2])


def test_an_odd_size_cannot_be_halved() -> None:
    message = r"split=0: size 3 of dimension 0 is odd and cannot be halved \(shape \(3, 2\)\); .*split='duplicate'"
    with pytest.raises(ValueError, match=message):
        trees.halve({"x": torch.ones(2, 2), "y": Y}, 0)


@pytest.mark.parametrize(("shape", "dim"), [((2, 2), 2), ((2, 2), -3), ((), 0)])
def test_a_dimension_that_does_not_exist(shape: tuple[int, ...], dim: int) -> None:
    with pytest.raises(ValueError, match=rf"split={dim}: a tensor of shape .* has no dimension {dim}"):
        trees.halve(torch.ones(shape), dim)


def test_a_dimension_of_size_zero_has_two_halves() -> None:
    assert [half.shape for half in trees.halve(torch.ones(3, 0), -1)] == [(3, 0), (3, 0)]


def test_leaves_of_one_type() -> None:
    generator = torch.Generator()
    tree = {"x": X, "deep": [generator, (Y, "text", 1, None)]}
    assert [id(leaf) for leaf in trees.leaves_of(tree, Tensor)] == [id(X), id(Y)]
    assert trees.leaves_of(tree, torch.Generator) == [generator]
    assert trees.leaves_of(X, Tensor) == [X]
    for nothing in (None, {}, "text", 0, 1.5, object()):
        assert trees.leaves_of(nothing, Tensor) == []


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_leaves_of_what_has_no_truth_value(kind: str) -> None:
    several = torch.ones(3) if kind == "tensor" else pytest.importorskip("numpy").ones(3)
    assert trees.leaves_of(several, torch.Generator) == []


# Version counters


def test_version_of_inference_tensors_is_none() -> None:
    with torch.inference_mode():
        inferred = torch.ones(2)
    usual = torch.ones(2)
    usual.add_(1)
    assert trees.version(inferred) is None
    assert trees.version(usual) == 1
    assert trees.versions([usual, inferred]) == [1, None]


def test_versions_of_many() -> None:
    a, b = torch.ones(2), torch.ones(2)
    before = trees.versions([a, b])
    b.add_(1)
    assert trees.versions([a, b]) == [before[0], before[1] + 1]
    assert trees.versions([]) == []


# What torch has no public name for


@pytest.mark.parametrize("change", ["in place", "view", "detached", "optimizer", "copy_"])
def test_the_version_counter_sees_every_change_in_place(change: str) -> None:
    tensor = torch.ones(4, requires_grad=change == "optimizer")
    before = tensor._version
    if change == "in place":
        tensor.add_(1)
    elif change == "view":
        tensor[1:].mul_(2)
    elif change == "detached":
        tensor.detach().mul_(2)
    elif change == "copy_":
        tensor.copy_(torch.zeros(4))
    else:
        tensor.grad = torch.ones(4)
        torch.optim.SGD([tensor], lr=0.1).step()
    assert tensor._version > before


def test_the_version_counter_of_an_inference_tensor_raises() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2)
    with pytest.raises(RuntimeError, match="Inference tensors do not track version counter"):
        _ = tensor._version


def test_the_base_of_a_view() -> None:
    tensor = torch.ones(4, requires_grad=True)
    assert tensor._base is None
    assert tensor[1:]._base is tensor
    assert tensor[1:][:1].view(1)._base is tensor
    assert tensor.clone()._base is None
    assert tensor[1:]._version == tensor._version


def test_flatten_up_to_takes_dictionaries_in_any_order() -> None:
    structure = pytree.tree_structure({"x": X, "y": Y})
    leaves = structure.flatten_up_to({"y": Y, "x": X})
    assert leaves[0] is X
    assert leaves[1] is Y


@pytest.mark.parametrize("other", [{"x": X}, {"x": X, "z": Y}, [X, Y], X, {"x": X, "y": Y, "z": Y}])
def test_flatten_up_to_raises_value_errors(other: Any) -> None:
    with pytest.raises(ValueError, match=r"(?i)mismatch"):
        pytree.tree_structure({"x": X, "y": Y}).flatten_up_to(other)


def test_flatten_up_to_leaves_what_is_below_its_leaves_alone() -> None:
    assert pytree.tree_structure([X]).flatten_up_to([{"deep": Y}]) == [{"deep": Y}]
