"""What each of the five classes does besides its block: routes, signals, thresholds, dropped layers, dictionaries."""

from __future__ import annotations

from typing import Any

import plain
import published
import pytest
import torch
from cases import CASES, DEPTH, OURS, TYPES, WIDTH, Case, Net, data, gradients, loss_of
from torch import Tensor, nn

AXIAL, REFORMER, NUWA, SE3, DUAL = CASES


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


# Blocks


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("kind", [list, tuple, iter, nn.ModuleList])
def test_blocks_in_any_iterable(case: Case, kind: Any) -> None:
    inner = nn.ModuleList if kind is nn.ModuleList else tuple
    blocks = [inner([Net() for _ in range(4 if case is DUAL else 2)]) for _ in range(DEPTH)]
    sequence = OURS[case.name](kind(blocks), *[[TYPES[0]] * DEPTH] if case is DUAL else [])
    assert [len(list(block.children())) for block in sequence.blocks] == [len(block) for block in blocks]


# Routes


@pytest.mark.parametrize("case", [AXIAL, REFORMER], ids=repr)
@pytest.mark.parametrize("route", [(True, True), (True, False), (False, True)], ids=str)
def test_arg_route(case: Case, route: tuple[bool, bool]) -> None:
    found = {}
    for variant in ("published", "ours", "plain"):
        sequence, x, context = case.build(variant), data(), data(2)
        doubled = torch.cat((x, x), dim=2) if case is REFORMER else x
        out = sequence(doubled, arg_route=route, context=context)
        loss_of(out).backward()
        found[variant] = [out.detach(), x.grad, context.grad, gradients(sequence)]
    assert_same(found["ours"], found["plain"])
    assert_same(found["ours"], found["published"])


@pytest.mark.parametrize("case", [AXIAL, REFORMER], ids=repr)
def test_default_of_arg_route(case: Case) -> None:
    """Both for axial, only f for reformer."""
    x = torch.cat((data(), data()), dim=2) if case is REFORMER else data()
    outputs = [case.build(variant)(x, context=data(2)) for variant in ("ours", "published")]
    assert_same(*outputs)
    other = case.build("plain")(x, arg_route=(True, case is REFORMER), context=data(2))
    assert not torch.allclose(outputs[0], other)


@pytest.mark.parametrize("case", [AXIAL, REFORMER], ids=repr)
def test_a_keyword_that_arg_route_gives_to_nobody(case: Case) -> None:
    x = torch.cat((data(), data()), dim=2) if case is REFORMER else data()
    ours, expected = case.build("ours"), case.build("published")(x, arg_route=(False, False), context=data(2))
    with pytest.warns(UserWarning, match=r"'context'.*arg_route=\(False, False\) gives it to no network"):
        found = ours(x, arg_route=(False, False), context=data(2))
    assert_same(found, expected)
    ours(x, arg_route=(False, False))  # nothing to warn of


class Reads(Net):
    """A network that reads any two keywords and notes which it was given."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.log = log

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        self.log.append(sorted(kwargs))
        return super().forward(x, **kwargs) * kwargs.get("scale", 1.0)


def routed(variant: str, route: dict[str, Any], **kwargs: Any) -> tuple[Any, list[Any]]:
    """Output and gradients of nuwa's class, and which keywords its networks were given in the forward."""
    log: list[Any] = []
    sequence, x = NUWA_CLASSES[variant]([(Reads(log), Reads(log)) for _ in range(DEPTH)], args_route=route), data()
    with torch.no_grad():
        for index, parameter in enumerate(sequence.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) * (1 + index % 3) / 3)
    out = sequence(x, **kwargs)
    seen = list(log)
    loss_of(out).backward()
    return [out.detach(), x.grad, gradients(sequence)], seen


NUWA_CLASSES = {"published": published.CLASSES["nuwa"], "ours": OURS["nuwa"], "plain": plain.CLASSES["nuwa"]}


def test_routes_by_key_and_depth() -> None:
    route = {
        "context": ((True, False), (False, True), (True, True)),
        "scale": ((False, False), (True, False), (False, True)),
        "absent": ((True, True),) * 3,
    }
    kwargs = {"context": data(2, requires_grad=False), "scale": 0.5}
    found = {variant: routed(variant, route, **kwargs) for variant in NUWA_CLASSES}
    assert found["ours"][1] == [["context"], [], ["scale"], ["context"], ["context"], ["context", "scale"]]
    assert found["ours"][1] == found["published"][1] == found["plain"][1]
    assert_same(found["ours"][0], found["plain"][0])
    assert_same(found["ours"][0], found["published"][0])


def test_a_key_without_a_route() -> None:
    expected = routed("published", {}, scale=0.5)
    with pytest.warns(UserWarning, match="'scale': no route, so no network gets it"):
        found = routed("ours", {}, scale=0.5)
    assert found[1] == expected[1]
    assert_same(found[0], expected[0])


def test_a_route_that_is_too_short() -> None:
    route = {"scale": ((True, True),)}
    expected = routed("published", route, scale=0.5)
    with pytest.warns(UserWarning, match="'scale': its route has 1 entries"):
        found = routed("ours", route, scale=0.5)
    assert found[1] == expected[1] == [["scale"], ["scale"], [], [], [], []]
    assert_same(found[0], expected[0])


# Reformer: dropped layers, the threshold, signals


class Noted(Net):
    """A network that notes each call: its name, what it was told, whether autograd was on."""

    def __init__(self, name: str, log: list[Any]) -> None:
        super().__init__()
        self.name, self.log = name, log

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        self.log.append((self.name, {key: kwargs[key] for key in ("_reverse", "_depth") if key in kwargs}))
        return super().forward(x)


def noted(variant: str, depth: int = 4, **options: Any) -> tuple[nn.Module, list[Any]]:
    """Reformer's class, and the calls of its networks."""
    torch.manual_seed(0)
    log: list[Any] = []
    kind = {"published": published.CLASSES, "ours": OURS}[variant]["reformer"]
    return kind([(Noted(f"f{i}", log), Noted(f"g{i}", log)) for i in range(depth)], **options), log


def step(sequence: nn.Module, log: list[Any], seed: int = 1) -> tuple[list[Any], list[Any]]:
    """The calls in the forward, and those in the backward."""
    log.clear()
    torch.manual_seed(seed)
    out = sequence(torch.cat((data(), data()), dim=2))
    forward = list(log)
    loss_of(out).backward()
    return forward, log[len(forward) :]


@pytest.mark.parametrize("probability", [0.5, 0.95])
def test_layer_dropout_drops_what_the_published_class_drops(probability: float) -> None:
    sequences = [noted(variant, layer_dropout=probability) for variant in ("published", "ours")]
    alone = 0
    for seed in range(20):
        expected, found = ((step(sequence, log, seed), torch.get_rng_state().tolist()) for sequence, log in sequences)
        assert found == expected
        (forward, _), _ = found
        alone += [name for name, _ in forward] == ["f0", "g0"]
    assert alone or probability < 0.9  # where all would be dropped, block 0 stays
    for sequence, log in sequences:
        sequence.eval()
        with torch.no_grad():
            log.clear()
            sequence(torch.cat((data(), data()), dim=2))
        assert len(log) == 8


@pytest.mark.parametrize("signal", [False, True])
@pytest.mark.parametrize("threshold", [0, 5, 6, 7])
def test_threshold_and_signals(threshold: int, signal: bool) -> None:
    """Length 6: replayed above the threshold only; signals in both passes of what is replayed, and nowhere else."""
    found = {}
    for variant in ("published", "ours"):
        sequence, log = noted(variant, depth=2, reverse_thres=threshold, send_signal=signal)
        found[variant] = step(sequence, log)
    assert found["ours"] == found["published"]
    forward, backward = found["ours"]
    assert [name for name, _ in forward] == ["f0", "g0", "f1", "g1"]
    assert [name for name, _ in backward] == (["g1", "f1", "g0", "f0"] if threshold < 6 else [])
    sent = signal and threshold < 6
    assert all(told == ({"_reverse": False, "_depth": int(name[1])} if sent else {}) for name, told in forward)
    assert all(told == ({"_reverse": True, "_depth": int(name[1])} if sent else {}) for name, told in backward)


def test_signals_go_with_any_route() -> None:
    for route in ((True, True), (False, True), (False, False)):
        found = {}
        for variant in ("published", "ours"):
            sequence, log = noted(variant, depth=2, send_signal=True)
            sequence(torch.cat((data(), data()), dim=2), arg_route=route)
            found[variant] = log
        assert found["ours"] == found["published"]


def test_depth_signalled_with_dropped_layers() -> None:
    """The place among all blocks, not among those that are left."""
    found = {}
    for variant in ("published", "ours"):
        sequence, log = noted(variant, layer_dropout=0.5, send_signal=True)
        found[variant] = [step(sequence, log, seed) for seed in range(5)]
    assert found["ours"] == found["published"]


def test_signals_without_grad() -> None:
    found = {}
    for variant in ("published", "ours"):
        sequence, log = noted(variant, depth=1, send_signal=True)
        with torch.no_grad():
            sequence(torch.cat((data(), data()), dim=2))
        found[variant] = log
    assert found["ours"] == found["published"]


def test_signalled_networks_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torch.compile(model) each network gets a torch.compile of its own: one, not one per call."""
    compiled: list[Any] = []

    def compile_(fn: Any, **options: Any) -> Any:
        compiled.append(fn)
        return fn

    sequence, log = noted("ours", depth=2, send_signal=True)
    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for _ in range(3):
        step(sequence, log)
    assert len(compiled) == 4


# SE3: dictionaries


class PerDegree(nn.Module):
    """A matrix for each degree, and whatever tensors the keywords hide."""

    def __init__(self, channels: dict[str, int]) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({key: torch.randn(count, count) * 0.3 for key, count in channels.items()})

    def forward(self, x: dict[str, Tensor], edge_info: Any = None, basis: Any = None) -> dict[str, Tensor]:
        scale = 1.0
        if edge_info is not None:
            _, (weight, *_rest) = edge_info
            scale = weight.sigmoid() * basis["0,1"]["deep"][0].cos()
        return {key: torch.einsum("bncm,cd->bndm", value.tanh(), self.weights[key]) * scale for key, value in x.items()}


def fiber(channels: dict[str, int]) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {key: torch.randn(2, 5, n, 2 * int(key) + 1, requires_grad=True) for key, n in channels.items()}


def run_se3(kind: type[nn.Module], channels: dict[str, int], **kwargs: Any) -> list[Any]:
    torch.manual_seed(0)
    sequence, x = kind([(PerDegree(channels), PerDegree(channels)) for _ in range(DEPTH)]), fiber(channels)
    out = sequence(x, **kwargs)
    assert list(out) == list(x)
    sum(loss_of(value) for value in out.values()).backward()
    return [
        {key: value.detach() for key, value in out.items()},
        [value.grad for value in x.values()],
        gradients(sequence),
    ]


def test_unequal_channel_counts() -> None:
    channels = {"0": 6, "1": 3, "2": 1}
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        run_se3(published.CLASSES["se3"], channels)
    assert_same(run_se3(OURS["se3"], channels), run_se3(plain.CLASSES["se3"], channels))


def test_equal_channel_counts() -> None:
    channels = {"0": 4, "1": 4}
    expected = run_se3(plain.CLASSES["se3"], channels)
    assert_same(run_se3(OURS["se3"], channels), expected)
    assert_same(run_se3(published.CLASSES["se3"], channels), expected)


def test_tensors_hidden_in_tuples_and_dicts() -> None:
    """Leaves and results of other networks, as `edge_info` and `basis` carry them."""
    found = {}
    for kind in (plain.CLASSES["se3"], OURS["se3"]):
        torch.manual_seed(9)
        weight, angle, extra = torch.randn(1, requires_grad=True), torch.randn(1, requires_grad=True), torch.ones(1)
        arrivals: list[Tensor] = []
        made = angle * 2
        made.register_hook(arrivals.append)
        out = run_se3(kind, {"0": 4, "1": 2}, edge_info=(None, (weight, extra)), basis={"0,1": {"deep": [made]}})
        assert len(arrivals) == 1
        found[kind] = [out, weight.grad, angle.grad, arrivals]
    ours, expected = found[OURS["se3"]], found[plain.CLASSES["se3"]]
    assert expected[1].abs() > 0
    assert expected[2].abs() > 0
    assert_same(ours, expected)


# Video and audio


class Attends(nn.Module):
    """A head of attention over itself, a context, or another modality, with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.2)

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None, context_mask: Tensor | None = None
    ) -> Tensor:
        read = x if context is None else context
        scores = self.query(x) @ self.key(read).transpose(1, 2)
        if context_mask is not None:
            scores = scores.masked_fill(~context_mask[:, None], -1e9)
        out = self.dropout(scores.softmax(-1)) @ self.value(read)
        return out if mask is None else out * mask[..., None]


def run_dual(kind: type[nn.Module], *, masks: bool, reverse: bool = True, training: bool = True) -> list[Any]:
    torch.manual_seed(0)
    types = [*TYPES, TYPES[2], TYPES[1]]
    sequence = kind([[Attends(), Net(), Attends(), Net()] for _ in types], types).train(training)
    video, audio, text = (torch.randn(2, length, WIDTH, requires_grad=True) for length in (6, 4, 3))
    given = {}
    if masks:
        named = zip(("video_mask", "audio_mask", "context_mask"), (video, audio, text), strict=True)
        given = {name: torch.arange(x.shape[1]).expand(2, -1) < x.shape[1] - 1 for name, x in named}
    torch.manual_seed(4)
    out = sequence(video, audio, context=text, reverse=reverse, **given)
    assert isinstance(out, list)
    (loss_of(out[0]) + 2 * loss_of(out[1])).backward()
    return [[value.detach() for value in out], video.grad, audio.grad, text.grad, gradients(sequence)]


@pytest.mark.parametrize("masks", [False, True])
def test_video_and_audio(masks: bool) -> None:
    expected = run_dual(plain.CLASSES["dual"], masks=masks)
    assert_same(run_dual(OURS["dual"], masks=masks), expected)
    assert_same(run_dual(published.CLASSES["dual"], masks=masks), expected)
    assert_same(
        run_dual(OURS["dual"], masks=masks, training=False),
        run_dual(plain.CLASSES["dual"], masks=masks, training=False),
    )


def test_video_and_audio_without_reversal() -> None:
    """`reverse=False` keeps the activations: no network runs twice."""
    calls = {}
    for reverse in (True, False):
        log: list[Any] = []
        sequence = OURS["dual"]([[Noted(name, log) for name in "fgjk"]], [TYPES[0]])
        video, audio = sequence(data(), data(2), context=None, reverse=reverse)
        (loss_of(video) + loss_of(audio)).backward()
        calls[reverse] = len(log)
    assert calls == {True: 8, False: 4}
    assert_same(run_dual(OURS["dual"], masks=True, reverse=False), run_dual(plain.CLASSES["dual"], masks=True))


@pytest.mark.parametrize("variant", ["published", "ours"])
def test_unknown_block_type(variant: str) -> None:
    kind = {"published": published.CLASSES, "ours": OURS}[variant]["dual"]
    with pytest.raises(ValueError, match="self_attention"):
        kind([[Net() for _ in range(4)]], ["self_attention"])


def test_more_blocks_than_types() -> None:
    """The published class drops the rest in silence."""
    blocks = [[Net() for _ in range(4)] for _ in range(2)]
    assert len(published.CLASSES["dual"](blocks, TYPES[:1]).blocks) == 1
    with pytest.raises(ValueError, match="1 kinds for 2 blocks"):
        OURS["dual"](blocks, TYPES[:1])


def test_a_mask_that_no_block_uses() -> None:
    sequence = OURS["dual"]([[Net() for _ in range(4)]], [TYPES[0]])
    mask = torch.ones(2, 6, dtype=torch.bool)
    with pytest.warns(UserWarning, match="'context_mask', 'video_mask', 'audio_mask': no block"):
        sequence(data(), data(), context=data(), context_mask=mask, video_mask=mask.clone(), audio_mask=mask.clone())


def test_a_cache_that_the_forward_fills_is_what_the_replay_finds() -> None:
    """As the LSH attention of the package does it, which hashes where it is not told to look into its cache."""
    log: list[str] = []

    class Hashing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self._cache = nn.Linear(4, 4), {}

        def forward(self, x: Tensor, _reverse: bool = False, _depth: int | None = None) -> Tensor:
            if not (_reverse and self._cache):
                log.append("hashed")
                self._cache = {"order": x.detach().mean(-1).argsort(-1)}
            order = self._cache["order"][..., None].expand(-1, -1, x.shape[-1])
            return self.linear(x.gather(1, order)).tanh()

    class Plain(nn.Linear):
        def forward(self, x: Tensor, _reverse: bool = False, _depth: int | None = None) -> Tensor:
            return super().forward(x)

    net = OURS[REFORMER.name]([(Hashing(), Plain(4, 4)) for _ in range(2)], send_signal=True)
    net(torch.randn(2, 3, 8, requires_grad=True)).sum().backward()
    assert log == ["hashed"] * 2
