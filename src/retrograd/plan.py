"""`plan`: will a model fit, and what will it cost? The prediction of `measure`, made without allocating anything.

One training step runs on fake tensors (shapes without data) for each policy, under the same ledger as a real one. What
the fake operators return is what the real ones return, so the sum of their sizes is the peak.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils import flop_counter
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from . import alarms
from .auto import Auto
from .engine import run
from .ledger import Ledger
from .measure import belongings, exchanged, format_bytes, ledger_step, parse_bytes, table, train_step
from .policies import Keep, Policy, Reverse
from .reversible import Reversible
from .streams import Stream, leaves_of
from .update import Update, program


@dataclass(frozen=True)
class PlanRow:
    """One policy: its peak in bytes, how much of that are activations, its arithmetic and its calls of `fn`.

    `relative` is `flops` over those of kept activations; `calls` counts replays; `fits` is None without a card.
    """

    policy: str
    peak: int
    activations: int
    flops: int
    relative: float
    calls: int
    fits: bool | None


@dataclass(frozen=True)
class Plan:
    """What `plan` found: a row for each policy. `states` are the bytes of the optimizer, part of every peak."""

    device: str
    weights: int
    states: int
    card: int | None
    rows: tuple[PlanRow, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, policy: str) -> PlanRow:
        """The row of a policy, by its name in the table."""
        rows = {row.policy: row for row in self.rows}
        if policy not in rows:
            raise KeyError(f"no row {policy!r}; there are {', '.join(rows)}{'. '.join(['', *self.notes])}")
        return rows[policy]

    def __str__(self) -> str:
        heading = f"one step on {self.device}: weights {format_bytes(self.weights)}"
        if self.states:
            heading += f", optimizer {format_bytes(self.states)}"
        if self.card is not None:
            heading += f", card {format_bytes(self.card)}"
        rows = [("policy", "peak", "activations", "FLOPs", "calls of fn", *(["fits"] if self.card is not None else []))]
        for row in self.rows:
            cost = (f"{row.relative:.2f}x", str(row.calls))
            fits = () if row.fits is None else ("yes" if row.fits else "no",)
            rows.append((row.policy, format_bytes(row.peak), format_bytes(row.activations), *cost, *fits))
        return "\n\n".join([heading, table(rows), *(textwrap.fill(note, 80) for note in self.notes)])


def plan(
    build: Callable[[], nn.Module] | nn.Module,
    *inputs: Any,
    budgets: Iterable[int | float | str] = (),
    card: int | str | None = None,
    device: str | torch.device | None = None,
    autocast: torch.dtype | None = None,
    optimizer_states: int = 0,
    also: Iterable[Policy] = (),
    **kwargs: Any,
) -> Plan:
    """Predict the peak and the cost of a training step for kept, checkpointed and reversed activations, for
    `Auto(budget)` with each of `budgets` (a fraction is one of `card`), and for the policies in `also`. Nothing is
    allocated and nothing computed.

    `build` makes the model, which has at least one `Reversible` in it (a model works too, and is left alone).
    `inputs` are tensors, or their shapes (float32); keywords go to the model. `card` is the memory there is.
    `optimizer_states` tensors as large as the weights are held all the time: 2 for Adam. `checkpointed` runs as many
    updates as the program has targets (a block) inside each `torch.utils.checkpoint`. An update's own policy stays.

    On CUDA storages are rounded up as its allocator does (512 bytes). Not foreseen: what operators allocate inside (the
    workspace of an attention's backward, a few percent; that of an LSTM on a CPU, which is large), fragments, and some
    0.5 GiB for the context. Without a GPU here, the operators of the CPU stand in for those of CUDA: attention with
    dropout or a mask may be planned too large.

    >>> import retrograd as rg
    >>> def build():
    ...     return rg.ReversibleSequence([(nn.Linear(1024, 1024), nn.Linear(1024, 1024)) for _ in range(48)])
    >>> found = plan(build, (2, 131072, 1024), card="80GiB")
    >>> [(row.policy, row.fits) for row in found.rows]
    [('kept', False), ('checkpointed', False), ('reversed', True)]
    """
    wanted = torch.device(device or next((t.device for t in leaves_of([inputs, kwargs], Tensor)), "cpu"))
    if wanted.type == "meta":
        wanted = torch.device("cpu")
    on_cuda = wanted.type == "cuda"
    stands_in = on_cuda and not torch.cuda.is_available()
    actual = torch.device("cpu") if stands_in else wanted
    limit = None if card is None else parse_bytes(card)
    sizes = _budgets(budgets, limit)
    policies = list(also)
    for policy in policies:
        if not isinstance(policy, Policy):
            raise TypeError(f"plan: also takes policies such as Reverse(anchor_every=16), not {policy!r}")
    if not isinstance(optimizer_states, int) or optimizer_states < 0:
        raise ValueError(f"plan: optimizer_states must be a number of tensors, 0 or more, not {optimizer_states!r}")
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise TypeError(f"plan: autocast must be a dtype such as torch.bfloat16, not {autocast!r}")
    ledgers: dict[str, tuple[_FakeLedger, int]] = {}
    notes = ["There is no GPU here: sizes are those of the CPU's operators."] if stands_in else []
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _fakes(mode, actual):
        model = _faked_model(build, mode).to(actual)
        reversibles = [module for module in model.modules() if isinstance(module, Reversible)]
        if not reversibles:
            raise ValueError(f"{type(model).__name__} has no Reversible in it: there is no policy to choose")
        given, keywords = _faked((inputs, kwargs), mode, actual)
        for name, context in _scenarios(reversibles, sizes, policies):
            try:
                with context:
                    ledgers[name] = _predict(model, given, keywords, actual, autocast, 512 if on_cuda else 1)
            except RuntimeError as error:
                if not str(error).startswith("Auto: "):
                    raise
                notes.append(f"{error}.")  # a budget that cannot be met
    weights = next(iter(ledgers.values()))[1]
    kept = ledgers["kept"][0].flops
    states = optimizer_states * sum(p.nbytes for p in model.parameters())
    rows = []
    for name, (ledger, _) in ledgers.items():
        peak, calls = ledger.peak + states, sum(row.calls for row in ledger.updates.values())
        activations = ledger.peak - sum(ledger.at_peak[:2])
        fits = None if limit is None else peak <= limit
        rows.append(PlanRow(name, peak, activations, ledger.flops, ledger.flops / kept if kept else 1.0, calls, fits))
    return Plan(str(wanted), weights, states, limit, tuple(rows), tuple(notes))


def _budgets(budgets: Iterable[int | float | str], card: int | None) -> dict[str, int]:
    """The bytes of each budget, by how it was written; a fraction is one of the card."""
    if isinstance(budgets, (str, int, float)):
        raise TypeError(f"plan: budgets is a list, such as [{budgets!r}]")
    sizes: dict[str, int] = {}
    for given in budgets:
        budget: Any = Auto(given).budget
        if not isinstance(budget, float):
            written = given if isinstance(given, str) else format_bytes(budget)
            sizes[written if sizes.get(written, budget) == budget else f"{budget} bytes"] = budget
        elif card is None:
            raise ValueError(f"plan: a budget of {budget} is a fraction of the card; say how large it is: card='80GiB'")
        else:
            sizes[str(budget)] = int(budget * card)
    return sizes


def _scenarios(
    reversibles: Sequence[Reversible], budgets: Mapping[str, int], also: Iterable[Policy]
) -> Iterator[tuple[str, Any]]:
    """The name of each row, and the context in which the model behaves so."""
    yield "kept", exchanged(reversibles, "policy", Keep())
    yield "checkpointed", checkpointed(reversibles)
    yield "reversed", exchanged(reversibles, "policy", Reverse())
    for written, budget in budgets.items():
        yield f"Auto({written})", exchanged(reversibles, "policy", Auto(budget))
    for policy in also:
        yield _label(policy), exchanged(reversibles, "policy", copy.copy(policy))  # Auto would learn from fake tensors


def _label(policy: Policy) -> str:
    """A policy with what is not its default."""
    told = {
        field.name: getattr(policy, field.name)
        for field in dataclasses.fields(policy)  # type: ignore[arg-type]
        if field.repr and getattr(policy, field.name) != field.default
    }
    if isinstance(told.get("save"), tuple):
        told["save"] = (
            "attention"
            if policy == Reverse(save="attention")
            else sorted({str(operator.overloadpacket) for operator in told["save"]})
        )
    return f"{type(policy).__name__}({', '.join(f'{name}={value!r}' for name, value in told.items())})"


def _predict(
    model: nn.Module,
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
    device: torch.device,
    autocast: torch.dtype | None,
    rounding: int,
) -> tuple[_FakeLedger, int]:
    """The ledger of one step, and the bytes of the weights."""
    context = torch.autocast(device.type, autocast) if autocast is not None else nullcontext()
    weights, others = belongings(model, inputs, kwargs)
    leaves = [tensor for tensor in (*weights, *others) if tensor.is_leaf and tensor.requires_grad]
    ledger = _FakeLedger(device, rounding)
    ledger.hold(weights, "weights")
    size = ledger.live
    ledger.hold(others)
    learns = any(isinstance(module, Reversible) and isinstance(module.policy, Auto) for module in model.modules())
    try:
        if learns or any(
            True for _ in model.buffers()
        ):  # Auto learns in the first step, the engine copies buffers in it
            with _FakeLedger(device):
                train_step(model, inputs, kwargs, context, leaves)
        ledger_step(ledger, model, inputs, kwargs, context, leaves)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(f"plan works without data, but the model asks for values: {error}") from error
    return ledger, size


class _FakeLedger(Ledger):
    """A ledger of fake tensors that also counts arithmetic. Operators on real tensors (generator states) run aside."""

    def __init__(self, device: torch.device, rounding: int = 1) -> None:
        super().__init__(device, rounding)
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # fake tensors ask for it all the time
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        tensors = leaves_of([args, kwargs or {}], Tensor)
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if (count := _flop_formula(func)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out


@functools.cache
def _flop_formula(func: Any) -> Callable[..., int] | None:
    operator = getattr(func, "_overloadpacket", func)
    return flop_counter.flop_registry.get(operator) or _CPU_ATTENTION.get(operator)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward_flops(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> int:
    return flop_counter.sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


_CPU_ATTENTION = {  # which torch's registry lacks
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


@contextmanager
def _fakes(mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Fake tensors on one device, with what asks for their values, runs kernels on them or swaps them put aside."""
    converted: dict[int, tuple[Tensor, Tensor]] = {}  # in one conversion: what shares a weight goes on sharing it
    walking: list[nn.Module] = []

    def convert(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        if id(tensor) not in converted:
            new = function(tensor.detach()).to(device)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            converted[id(tensor)] = converted[id(new)] = tensor, new
        return converted[id(tensor)][1]

    def apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        walking.append(module)
        for child in module.children() if recurse else ():
            child._apply(function)
        members: dict[str, Any]
        for members in (module._parameters, module._buffers):
            for name, tensor in members.items():
                if tensor is not None:
                    members[name] = convert(tensor, function)
        walking.pop()
        if not walking:
            converted.clear()
        return module

    places: list[tuple[Any, str, Any]] = [
        (nn.Module, "_apply", apply),
        (alarms.RangeAlarms, "check", lambda self, *, wait: None),
        (alarms.DriftWatch, "compare", lambda self, leaves, turn: None),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for owner, name, replaced in places:
            setattr(owner, name, replaced)
        with mode, device:
            yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _faked_model(build: Callable[[], nn.Module] | nn.Module, mode: FakeTensorMode) -> nn.Module:
    model = build if isinstance(build, nn.Module) else build()
    if not isinstance(model, nn.Module):
        raise TypeError(f"build must return a module, not {type(model).__name__}")
    if all(isinstance(tensor, FakeTensor) for tensor in (*model.parameters(), *model.buffers())):
        return model
    with FakeCopyMode(mode):
        return copy.deepcopy(model)


def _faked(inputs: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    """The inputs as fake tensors on the device: tensors of any kind, and shapes, which become float32."""

    def fake(value: Any) -> Any:
        if isinstance(value, tuple):
            return torch.empty(value, device=device)
        if not isinstance(value, Tensor):
            return value
        made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
        return made.requires_grad_(value.requires_grad)

    return pytree.tree_map(fake, inputs, is_leaf=_is_shape)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(type(size) is int for size in value)


@contextmanager
def checkpointed(reversibles: Sequence[Reversible]) -> Iterator[None]:
    """Each block of these modules (as many updates as it has targets) runs in a `torch.utils.checkpoint`, kept."""

    def replaced(module: Reversible, streams: Mapping[str, Stream], **kwargs: Any) -> dict[str, Stream]:
        updates = program(module.updates(**kwargs), streams)
        size = len({update.target for update in updates})
        draws = not any(isinstance(leaf, FakeTensor) for leaf in leaves_of(dict(streams), Tensor))
        now = dict(streams)
        for start in range(0, len(updates), size):
            block = functools.partial(_run_block, updates[start : start + size])
            now = checkpoint(block, now, use_reentrant=False, preserve_rng_state=draws)
        return now

    try:
        for module in reversibles:
            module.run = functools.partial(replaced, module)  # type: ignore[method-assign]
        yield
    finally:
        for module in reversibles:
            del module.run


def _run_block(updates: list[Update], streams: dict[str, Stream]) -> dict[str, Stream]:
    return run(updates, streams, policy=Keep())
