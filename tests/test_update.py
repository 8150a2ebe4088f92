"""What an update is, and what cannot be one (R1): errors name the update, what was seen, and what to do."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.streams import flatten
from retrograd.update import Step, program

TWO = {"x": torch.ones(2), "y": torch.ones(3)}


def returning(out: Any) -> Any:
    def fn(b: Any) -> Any:
        return out

    return fn


def run_once(out: Any, target: Any, join: rg.Join = rg.Add()) -> Any:
    """Join `out` to the target, at place 1 of a program."""
    updates = [rg.Update("b", torch.sin, "c"), rg.Update("a", returning(out), "b", join)]
    return rg.run(updates, {"a": target, "b": torch.ones(1), "c": torch.ones(1)})["a"]


# What an update is


@pytest.mark.parametrize("sources", ["bc", ["bc"], ("bc",), iter(["bc"])], ids=["name", "list", "tuple", "iterator"])
def test_sources_become_a_tuple_of_names(sources: Any) -> None:
    assert rg.Update("a", torch.sin, sources).sources == ("bc",)


def test_a_name_of_two_letters_is_one_source() -> None:
    assert rg.Update("a", torch.sin, "a2").sources == ("a2",)


def test_defaults_are_not_shared() -> None:
    first, second = rg.Update("a", torch.sin, "b"), rg.Update("a", torch.sin, "b")
    assert first.kwargs == {}
    assert first.kwargs is not second.kwargs
    assert first.join == rg.Add()
    assert first.policy is None


class Callable:
    def __call__(self, b: Tensor) -> Tensor:
        return b


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (torch.sin, "sin"),
        (nn.Linear(1, 1), "Linear"),
        (returning(None), "fn"),
        (lambda b: b, "<lambda>"),
        (partial(torch.sin), "partial"),
        (Callable(), "Callable"),
        (Callable().__call__, "__call__"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_name_of_a_fn(fn: Any, name: str) -> None:
    update = rg.Update("a", fn, "b")
    assert str(update) == f"Update of 'a' by {name}"
    assert update.label(7) == f"update 7 (target 'a', fn {name})"


def test_the_inverse_of_an_update_changes_the_join_alone() -> None:
    update = rg.Update("a", torch.sin, "b", rg.Scale(0.5, 2.0), {"k": 1}, rg.Keep())
    undo = update.inverse()
    for name in ("target", "fn", "sources", "kwargs", "policy"):
        assert getattr(undo, name) == getattr(update, name)
    x, out = torch.tensor([3.0]), torch.tensor([1.0])
    assert undo.join.apply(update.join.apply(x, out), out) == x
    assert undo.inverse() == update


def test_copies_are_equal() -> None:
    update = rg.Update("a", torch.sin, ("b", "c"), rg.Scale(0.5), {"k": 1}, rg.Reverse(anchor_every=2))
    assert copy.deepcopy(update) == update
    assert pickle.loads(pickle.dumps(update)) == update


def test_an_update_is_frozen() -> None:
    update = rg.Update("a", torch.sin, "b")
    with pytest.raises(AttributeError, match="target"):
        update.target = "b"  # type: ignore[misc]


# What cannot be one


@pytest.mark.parametrize("sources", ["a", ("b", "a")])
def test_target_among_the_sources(sources: Any) -> None:
    with pytest.raises(ValueError, match=r"Update of 'a' by sin: the target is among the sources .*split this one"):
        rg.Update("a", torch.sin, sources)


@pytest.mark.parametrize("fn", [None, "sin", torch.ones(1)], ids=["None", "text", "tensor"])
def test_fn_that_is_not_callable(fn: Any) -> None:
    with pytest.raises(TypeError, match=r"Update of 'a' by \w+: fn must be callable"):
        rg.Update("a", fn, "b")


@pytest.mark.parametrize("join", ["add", None, rg.Add, torch.add], ids=["text", "None", "class", "function"])
def test_join_that_is_none(join: Any) -> None:
    with pytest.raises(TypeError, match=r"Update of 'a' by sin: join must be a Join such as Add\(\), not "):
        rg.Update("a", torch.sin, "b", join)


@pytest.mark.parametrize("policy", ["keep", rg.Keep, 1, rg.Auto("1GiB")], ids=["text", "class", "number", "Auto"])
def test_policy_that_no_update_can_have(policy: Any) -> None:
    with pytest.raises(TypeError, match=r"Update of 'a' by sin: policy must be .* such as Keep\(\), not "):
        rg.Update("a", torch.sin, "b", policy=policy)


@pytest.mark.parametrize(("target", "sources"), [(1, "b"), ("a", (1,)), (None, "b"), ("a", ("b", None))])
def test_names_that_are_not_text(target: Any, sources: Any) -> None:
    with pytest.raises(TypeError, match=r"Update of .* by sin: target and sources are names of streams, not "):
        rg.Update(target, torch.sin, sources)


@pytest.mark.parametrize("sources", [None, 3])
def test_sources_that_are_no_names_at_all(sources: Any) -> None:
    with pytest.raises(TypeError, match="Update of 'a' by sin"):
        rg.Update("a", torch.sin, sources)


def test_kwargs_that_are_no_mapping() -> None:
    with pytest.raises(TypeError, match="Update of 'a' by sin"):
        rg.Update("a", torch.sin, "b", kwargs=None)  # type: ignore[arg-type]


def test_a_program_names_what_is_no_update_by_its_place() -> None:
    good = rg.Update("a", torch.sin, "b")
    with pytest.raises(TypeError, match="update 1 must be an Update, not 'sin'"):
        program([good, "sin"], "ab")  # type: ignore[list-item]


def test_a_program_is_read_once() -> None:
    updates = [rg.Update("a", torch.sin, "b")]
    assert program(iter(updates), iter("ab")) == updates


# What fn may return

Point = namedtuple("Point", ["x", "y"])


@pytest.mark.parametrize(
    ("out", "target", "shown"),
    [
        (torch.ones(2), TWO, r"a tensor of shape \(2,\)"),
        ({"x": torch.ones(2)}, TWO, r"a dict with keys \['x'\]"),
        ({"x": torch.ones(2), "z": torch.ones(3)}, TWO, r"a dict with keys \['x', 'z'\]"),
        ({**TWO, "z": torch.ones(3)}, TWO, r"a dict with keys \['x', 'y', 'z'\]"),
        ([torch.ones(2), torch.ones(3)], TWO, "a list of 2"),
        ((torch.ones(2),) * 3, (torch.ones(2),) * 2, "a tuple of 3"),
        ((torch.ones(2),) * 2, [torch.ones(2)] * 2, "a tuple of 2"),
        ((torch.ones(2),) * 2, Point(torch.ones(2), torch.ones(2)), "a tuple of 2"),
        ({"x": torch.ones(2), "y": [torch.ones(3)]}, TWO, r"a dict .*: expected a tensor, got a list"),
        ({"x": torch.ones(2), "y": 1.0}, TWO, r"a dict .*: expected a tensor, got a float"),
        ((torch.ones(2), None), torch.ones(2), "a tuple of 2"),
    ],
)
def test_structure_of_the_output(out: Any, target: Any, shown: str) -> None:
    message = rf"update 1 \(target 'a', fn fn\): fn must return the structure of its target, not {shown}"
    with pytest.raises(ValueError, match=message):
        run_once(out, target)


def test_a_dictionary_in_another_order_is_the_same_dictionary() -> None:
    out = run_once({"y": torch.full((3,), 5.0), "x": torch.full((2,), 7.0)}, TWO)
    assert list(out) == ["x", "y"]
    assert out["x"].tolist() == [8.0, 8.0]
    assert out["y"].tolist() == [6.0, 6.0, 6.0]


@pytest.mark.parametrize(("shape", "into"), [((), (2,)), ((1,), (2,)), ((2, 1), (2, 2)), ((2, 2), (2,)), ((3,), (2,))])
def test_shape_of_the_output(shape: tuple[int, ...], into: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"update 1 .*returned shape .* for a target of shape .*expand the output"):
        run_once(torch.ones(shape), torch.ones(into))


def test_shapes_are_compared_leaf_by_leaf() -> None:
    with pytest.raises(ValueError, match=r"returned shape \(2,\) for a target of shape \(3,\)"):
        run_once({"x": torch.ones(2), "y": torch.ones(2)}, TWO)


def test_complex_output_for_a_real_target() -> None:
    with pytest.raises(ValueError, match=r"update 1 .*returned torch.complex64 for a target of torch.float32"):
        run_once(torch.ones(2, dtype=torch.complex64), torch.ones(2))


def test_real_output_for_a_complex_target() -> None:
    assert run_once(torch.ones(1), torch.tensor([1j])).tolist() == [1 + 1j]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_the_stream_keeps_its_dtype(dtype: torch.dtype) -> None:
    out = run_once(torch.ones(2, dtype=dtype), torch.ones(2))
    assert out.dtype == torch.float32
    assert out.tolist() == [2.0, 2.0]


def test_fractions_for_an_integer_target() -> None:
    with pytest.raises(ValueError, match=r"update 1 .*torch.float32 for a target of torch.int64"):
        run_once(torch.tensor([0.7]), torch.tensor([-1]))


@pytest.mark.parametrize(
    ("out", "shown"),
    [
        (torch.ones(2, 2), r"a tensor of shape \(2, 2\)"),
        ((torch.ones(2),), "a tuple of 1"),
        ([torch.ones(2)] * 3, "a list of 3"),
        ({"log_scale": torch.ones(2), "shift": torch.ones(2)}, r"a dict with keys \['log_scale', 'shift'\]"),
        (None, "a NoneType"),
    ],
)
def test_affine_without_a_pair(out: Any, shown: str) -> None:
    with pytest.raises(ValueError, match=rf"update 1 \(target 'a', fn fn\): Affine needs 2 parts, fn returned {shown}"):
        run_once(out, torch.ones(2), rg.Affine())


@pytest.mark.parametrize("part", [0, 1])
def test_each_part_of_a_pair_fits_the_target(part: int) -> None:
    pair = [torch.zeros(2), torch.zeros(2)]
    pair[part] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"update 1 .*shape \(1,\) for a target of shape \(2,\)"):
        run_once(pair, torch.ones(2), rg.Affine())


def test_affine_on_a_dictionary() -> None:
    log_scale = {"y": torch.zeros(3), "x": torch.full((2,), 2.0).log()}
    out = run_once((log_scale, {"x": torch.ones(2), "y": torch.ones(3)}), TWO, rg.Affine())
    torch.testing.assert_close(out, {"x": torch.full((2,), 3.0), "y": torch.full((3,), 2.0)})


def test_the_inverse_of_affine_needs_the_pair_too() -> None:
    with pytest.raises(ValueError, match=r"Inverse needs 2 parts, fn returned a tensor of shape \(2,\)"):
        rg.invert([rg.Update("a", torch.sin, "b", rg.Affine())], {"a": torch.ones(2), "b": torch.ones(2)})


# A step


def step(update: rg.Update, **streams: Any) -> tuple[Step, dict[str, list[Tensor]]]:
    flat = {name: flatten(stream) for name, stream in streams.items()}
    structures = {name: structure for name, (_, structure) in flat.items()}
    return Step(3, update, update.fn, structures), {name: leaves for name, (leaves, _) in flat.items()}


def test_fn_sees_the_trees_in_the_order_of_its_sources() -> None:
    seen = []

    def fn(*streams: Any, k: int) -> Tensor:
        seen.append((streams, k))
        return torch.ones(2)

    c, b = {"x": torch.zeros(1)}, torch.ones(1)
    steps, flat = step(rg.Update("a", fn, ("c", "b"), kwargs={"k": 5}), a=torch.ones(2), b=b, c=c)
    steps.call([flat["c"], flat["b"]], flat["a"])
    (((first, second), k),) = seen
    assert first["x"] is c["x"]
    assert second is b
    assert k == 5


def test_fn_that_changes_a_tensor_of_a_source_tree() -> None:
    def fn(b: dict[str, Tensor]) -> Tensor:
        b["x"].add_(1)
        return torch.ones(2)

    steps, flat = step(rg.Update("a", fn, "b"), a=torch.ones(2), b={"x": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"update 3 \(target 'a', fn fn\): fn changes a source .*inplace=False"):
        steps.call([flat["b"]], flat["a"])


def test_unjoin_undoes_join_in_the_dtype_of_the_stream() -> None:
    steps, flat = step(rg.Update("a", torch.sin, "b", rg.Scale(0.5, 2.0)), a=torch.ones(2), b=torch.ones(2))
    parts = [[torch.full((2,), 3.0, dtype=torch.float64)]]
    (after,) = steps.join(flat["a"], parts)
    assert after.tolist() == [6.5, 6.5]
    assert after.dtype == torch.float32
    (before,) = steps.unjoin([after], parts)
    assert before.dtype == torch.float32
    assert torch.equal(before, flat["a"][0])


def test_keywords_are_those_of_the_moment_at_which_the_update_was_written() -> None:
    seen: list[int] = []

    def fn(b: Tensor, depth: int) -> Tensor:
        seen.append(depth)
        return b.sin() * depth

    class Counted(rg.Reversible):
        def updates(self, **kwargs: Any) -> Any:
            for depth in range(3):
                kwargs["depth"] = depth
                yield rg.Update("a", fn, "b", kwargs=kwargs)

    out = Counted()({"a": torch.ones(2), "b": torch.ones(2, requires_grad=True)})
    assert seen == [0, 1, 2]
    out["a"].sum().backward()
    assert seen == [0, 1, 2, 2, 1, 0]


def test_a_program_that_is_no_list() -> None:
    class Forgetful(rg.Reversible):
        def updates(self) -> Any:
            rg.Update("a", torch.sin, "b")

    streams = {"a": torch.ones(1), "b": torch.ones(1)}
    for call in (Forgetful(), Forgetful().inverse):
        with pytest.raises(TypeError, match=r"a program is a list of Updates, not None; does updates\(\) yield"):
            call(streams)
    with pytest.raises(TypeError, match="a program is a list of Updates, not Update"):
        rg.run(rg.Update("a", torch.sin, "b"), streams)  # type: ignore[arg-type]
