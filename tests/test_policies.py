"""Each policy against kept activations, in any mixture, counted in bytes and calls."""

import copy
import functools
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import retrograd as rg
from retrograd.measure import LiveBytes
from retrograd.sizes import format_bytes, parse_bytes


class Attention(nn.Module):
    def __init__(self, width: int, calls: list[str] | None = None) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.calls = [] if calls is None else calls

    def forward(self, x):
        self.calls.append("replay" if rg.phase() and rg.phase().replaying else "forward")
        q, k, v = self.project(self.norm(x)).unsqueeze(1).chunk(3, -1)
        return self.out(functional.scaled_dot_product_attention(q, k, v).squeeze(1))


def feed_forward(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def network(depth: int = 4, width: int = 16, policy: rg.Policy | None = None, calls: list[str] | None = None):
    torch.manual_seed(0)
    blocks = [(Attention(width, calls), feed_forward(width)) for _ in range(depth)]
    return rg.ReversibleSequence(blocks, policy=policy or rg.Reverse())


def gradients(net, x, **kwargs):
    return torch.autograd.grad(net(x, **kwargs).sin().sum(), [x, *net.parameters()])


def peak_bytes(net, x) -> int:
    return peak_bytes_of(net, lambda: net(x).square().mean())


def peak_bytes_of(net, loss) -> int:
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes() as memory:
        loss().backward()
    return memory.peak


POLICIES = [
    rg.Keep(),
    rg.Reverse(),
    rg.Reverse(anchor_every=3),
    rg.Reverse(save="output"),
    rg.Reverse(save="attention"),
    rg.Reverse(save="attention", anchor_every=2),
    rg.Reverse(watch=1e-3),
    rg.Reverse(graphed=True, anchor_every=5),
    rg.Offload(),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_gradients_equal_those_of_keep(policy):
    net, x = network().double(), torch.randn(2, 6, 16, dtype=torch.double, requires_grad=True)
    net.policy = rg.Keep()
    expected = gradients(net, x)
    net.policy = policy
    for a, b in zip(gradients(net, x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_of_policies_equals_keep(seed):
    """Each update with a policy of its own."""
    generator = torch.Generator().manual_seed(seed)
    net, x = network(depth=5).double(), torch.randn(2, 6, 16, dtype=torch.double, requires_grad=True)
    choices = torch.randint(len(POLICIES) + 1, (10,), generator=generator).tolist()
    program = [
        rg.Update(u.target, u.fn, u.sources, policy=None if c == len(POLICIES) else POLICIES[c])
        for u, c in zip(net.updates(), choices, strict=True)
    ]

    def grads(updates):
        out = rg.run(updates, {"a": x, "b": x})
        return torch.autograd.grad((out["a"] * out["b"]).sin().sum(), [x, *net.parameters()])

    expected = grads([rg.Update(u.target, u.fn, u.sources, policy=rg.Keep()) for u in net.updates()])
    for a, b in zip(grads(program), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("policy", "replays"), [(rg.Keep(), 0), (rg.Offload(), 0), (rg.Reverse(), 4)], ids=str)
def test_calls_of_fn(policy, replays):
    calls: list[str] = []
    net = network(policy=policy, calls=calls)
    net(torch.randn(2, 6, 16)).sum().backward()
    assert calls == ["forward"] * 4 + ["replay"] * replays


class TestSave:
    def test_the_operator_runs_once(self):
        class Count(TorchDispatchMode):
            attention = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.attention += "scaled_dot_product" in str(func) and "backward" not in str(func)
                return func(*args, **(kwargs or {}))

        found = {}
        for policy in (rg.Reverse(), rg.Reverse(save="attention")):
            with Count() as count:
                network(depth=3, policy=policy)(torch.randn(2, 6, 16)).sum().backward()
            found[policy] = count.attention
        assert [*found.values()] == [6, 3]

    def test_it_costs_the_outputs_of_the_operator(self):
        grow = [
            peak_bytes(network(16, policy=p), torch.randn(2, 6, 16))
            - peak_bytes(network(8, policy=p), torch.randn(2, 6, 16))
            for p in (rg.Reverse(), rg.Reverse(save="attention"))
        ]
        output, log_sum = 2 * 6 * 16 * 4, 2 * 6 * 4
        assert grow[0] == 0
        assert 8 * output <= grow[1] <= 8 * (output + 2 * log_sum)

    def test_a_second_backward_is_refused_with_a_reason(self):
        y = network(depth=1, policy=rg.Reverse(save="attention"))(torch.randn(2, 6, 16)).sum()
        y.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="extra time"):
            y.backward()

    def test_dropout_inside_a_saved_operator_is_refused(self):
        """What it drew is not drawn again in the replay, so all that comes after would differ."""

        def fn(x):
            return functional.dropout((x * torch.rand(x.shape)).sin(), 0.5)

        b = torch.ones(2, 4, requires_grad=True)
        out = rg.run([rg.Update("a", fn, "b")], {"a": b, "b": b}, policy=rg.Reverse(save="aten.rand"))
        with pytest.raises(RuntimeError, match=r"update 0 .* other random numbers"):
            out["a"].sum().backward()

    @pytest.mark.parametrize("save", ["attenton", "aten.no_such_operator", [torch.sin], 3, ["mm", None]])
    def test_what_does_not_exist_is_refused_where_it_is_written(self, save):
        with pytest.raises(ValueError, match="save must be 'output', 'attention' or operators"):
            rg.Reverse(save=save)

    def test_names_and_operators_are_the_same(self):
        mm = torch.ops.aten.mm.default
        assert mm in rg.Reverse(save="aten.mm").save
        assert mm in rg.Reverse(save=["aten::mm"]).save
        assert rg.Reverse(save=[mm]).save == (mm,)


class TestAuto:
    x = torch.randn(2, 32, 16)

    def test_unlimited_keeps_everything_after_the_first_step(self):
        calls: list[str] = []
        net = network(policy=rg.Auto("1GiB"), calls=calls)
        for replays in (4, 0, 0):
            calls.clear()
            net(self.x).sum().backward()
            assert calls.count("replay") == replays

    def test_the_peak_never_exceeds_the_budget(self):
        kept = peak_bytes(network(12, policy=rg.Keep()), self.x)
        reversed_ = peak_bytes(network(12), self.x)
        lengths = []
        for budget in itertools.chain(range(2 * reversed_, kept, (kept - reversed_) // 8), [kept * 2]):
            net = network(12, policy=rg.Auto(budget))
            peak_bytes(net, self.x)
            assert peak_bytes(net, self.x) <= budget
            lengths.append(next(iter(net.policy.learned.values())).kept)
        assert lengths == sorted(lengths)
        assert lengths[0] < 12 < lengths[-1] == 24

    def test_a_budget_that_cannot_be_met_names_the_smallest_that_can(self):
        net = network(policy=rg.Auto(1000))
        with pytest.raises(RuntimeError, match=r"cannot be met: .* \((\d+) bytes\)") as caught:
            net(self.x)
        smallest = int(str(caught.value).split("(")[1].split(" ")[0])
        net.policy = rg.Auto(smallest)
        assert max(peak_bytes(net, self.x) for _ in range(3)) <= smallest
        net.policy = rg.Auto(smallest - 1)
        with pytest.raises(RuntimeError, match="cannot be met"):
            net(self.x)

    def test_other_shapes_are_learned_anew(self):
        calls: list[str] = []
        net = network(policy=rg.Auto("1GiB"), calls=calls)
        for length, replays in ((8, 4), (8, 0), (16, 4), (16, 0), (8, 0)):
            calls.clear()
            net(torch.randn(2, length, 16)).sum().backward()
            assert calls.count("replay") == replays
        assert len(net.policy.explain().splitlines()) == 2

    def test_layer_dropout_is_no_new_program(self):
        net = network(8, policy=rg.Auto("1GiB"))
        net.layer_dropout = 0.5
        for _ in range(20):
            net(self.x).sum().backward()
        (learned,) = net.policy.learned.values()
        assert len(learned.saved) == 16
        assert learned.kept == learned.length > 0

    def test_an_update_with_a_policy_of_its_own_stands_aside(self):
        net, policy = network(4), rg.Auto("1GiB")
        program = [rg.Update(u.target, u.fn, u.sources) for u in net.updates()]
        program[-1] = rg.Update("b", program[-1].fn, "a", policy=rg.Keep())
        for _ in range(2):
            rg.run(program, {"a": self.x, "b": self.x}, policy=policy)
        (learned,) = policy.learned.values()
        assert (learned.kept, learned.length) == (7, 7)

    def test_gradients_equal_those_of_keep(self):
        net = network(8).double()
        x = self.x.double().requires_grad_()
        net.policy = rg.Keep()
        expected = gradients(net, x)
        net.policy = rg.Reverse()
        budget = 4 * peak_bytes(net, x)
        net.policy = rg.Auto(budget)
        for _ in range(2):
            for a, b in zip(gradients(net, x), expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        assert 0 < next(iter(net.policy.learned.values())).kept < 16

    def test_explain(self):
        policy = rg.Auto("1MiB")
        assert "not seen a training step" in policy.explain()
        net = network(2, policy=policy)
        net(self.x)
        assert "budget 1.0 MiB" in policy.explain()
        policy = net.policy = rg.Auto(next(iter(policy.learned.values())).need(0))  # nothing more fits
        for _ in range(2):
            net(self.x)
        assert "replays take about" in policy.explain()

    def test_frozen_weights_are_learned_anew_when_they_are_trained(self):
        net = network(8, policy=rg.Auto("1MiB")).requires_grad_(False)
        net(self.x)
        net.requires_grad_(True)
        net(self.x)
        (learned,) = net.policy.learned.values()
        assert learned.kept == 0
        net(self.x)
        assert learned.kept_bytes > 0

    def test_a_copy_learns_anew(self):
        net = network(2, policy=rg.Auto("1MiB"))
        net(self.x)
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert other.policy.budget == 2**20
            assert not other.policy.learned

    def test_a_submodule_that_is_replaced_is_learned_anew(self):
        class Wide(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.inner = nn.Linear(width, width)

            def forward(self, x):
                return self.inner(x.repeat(1, self.inner.in_features // 4)).tanh().unflatten(-1, (-1, 4)).sum(1)

        policy, f, g = rg.Auto(2**20), Wide(4), Wide(4)
        given = {name: torch.randn(8, 4, requires_grad=True) for name in "ab"}

        def step():
            out = rg.run([rg.Update("a", f, "b"), rg.Update("b", g, "a")], given, policy=policy)
            (out["a"].sum() + out["b"].sum()).backward()

        for _ in range(2):
            step()
        assert "the last 2 of 2 updates are kept" in policy.explain()
        f.inner = nn.Linear(64, 64)
        step()
        assert "1 were seen for the first time" in policy.explain()
        step()
        assert "the last 2 of 2 updates are kept" in policy.explain()
        (learned,) = policy.learned.values()
        assert learned.kept_bytes > 4 * 8 * 64

    def test_a_number_that_changes_at_each_step_is_no_new_program(self):
        policy, given = rg.Auto(2**20), {name: torch.randn(8, 4, requires_grad=True) for name in "ab"}
        for step in range(5):
            cool = rg.Update(
                "a", lambda b, temperature: (b / temperature).sin(), "b", kwargs={"temperature": 0.9**step}
            )
            rg.run([cool], given, policy=policy)["a"].sum().backward()
        assert "the last 1 of 1 updates are kept" in policy.explain()
        (learned,) = policy.learned.values()
        assert len(learned.saved) == 1

    def test_weights_of_lazy_modules_are_not_counted(self):
        policy, x = rg.Auto(2**20), torch.randn(2, 64, requires_grad=True)
        lazy = nn.LazyLinear(64)
        for _ in range(3):
            rg.run([rg.Update("a", lazy, "b")], {"a": x, "b": x}, policy=policy)["a"].sum().backward()
        (learned,) = policy.learned.values()
        assert max(learned.saved.values()) <= 2 * x.nbytes

    def test_functions_made_anew_do_not_gather(self):
        policy, weight = rg.Auto("1MiB"), torch.randn(8, requires_grad=True)
        for _ in range(3):
            update = rg.Update("a", functools.partial(torch.mul, other=weight), "b")
            rg.run([update], {"a": torch.zeros(8), "b": torch.ones(8)}, policy=policy)
        (learned,) = policy.learned.values()
        assert len(learned.saved) == 1

    def test_updates_that_only_look_alike_are_told_apart(self):
        """Small networks and large ones behind the same code: what the small ones save says nothing of the others."""

        def mlp(inside):
            return nn.Sequential(nn.Linear(16, inside), nn.GELU(), nn.Linear(inside, 16))

        class Called:
            def __init__(self, net):
                self.net = net

            def __call__(self, b):
                return self.net(b)

        def call(b, net):
            return net(b)

        class Choose(nn.Module):
            def __init__(self):
                super().__init__()
                self.nets = nets

            def forward(self, b, which):
                return self.nets[which](b)

        nets, x = nn.ModuleList([mlp(4), mlp(4), *[mlp(512) for _ in range(6)]]), torch.randn(16, 16)
        choose = Choose()
        ways = {
            "lambdas": lambda i, net: rg.Update("ab"[i % 2], lambda b: net(b), "ba"[i % 2]),
            "defaults": lambda i, net: rg.Update("ab"[i % 2], lambda b, net=net: net(b), "ba"[i % 2]),
            "methods": lambda i, net: rg.Update("ab"[i % 2], net.forward, "ba"[i % 2]),
            "objects": lambda i, net: rg.Update("ab"[i % 2], Called(net), "ba"[i % 2]),
            "partials": lambda i, net: rg.Update("ab"[i % 2], functools.partial(call, net=net), "ba"[i % 2]),
            "a number": lambda i, net: rg.Update("ab"[i % 2], choose, "ba"[i % 2], kwargs={"which": i}),
        }
        for name, way in ways.items():
            policy = rg.Auto("256KiB")  # two of the large ones; each saves 64 KiB and more
            for parameter in nets.parameters():
                parameter.grad = torch.zeros_like(parameter)
            for _ in range(3):
                with LiveBytes() as memory:
                    out = rg.run([way(i, net) for i, net in enumerate(nets)], {"a": x, "b": x}, policy=policy)
                    (out["a"].sum() + out["b"].sum()).backward()
                assert memory.peak <= 256 * 1024, name
            (learned,) = policy.learned.values()
            assert 0 < learned.kept < 8, name

    def test_keywords_of_other_shapes_are_learned_anew(self):
        class Cross(nn.Module):
            def __init__(self):
                super().__init__()
                self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

            def forward(self, b, context):
                key = self.key(context)
                return (self.query(b) @ key.mT).softmax(-1) @ key

        net = rg.ReversibleSequence([(Cross(), nn.Tanh()) for _ in range(6)], policy=rg.Auto("512KiB"))
        for length in (2, 2, 500, 500):
            peak = peak_bytes_of(net, lambda length=length: net(self.x[0], context=torch.randn(length, 16)).sum())
            latest = [*net.policy.learned.values()][-1]
            assert peak <= 512 * 1024 + max(latest.saved.values())  # softmax and products hold more than they save
        short, long = net.policy.learned.values()
        assert short.kept == 12 > long.kept

    def test_a_fraction_of_what_is_free(self):
        net = network(policy=rg.Auto(0.5))
        net(self.x).sum().backward()
        assert next(iter(net.policy.learned.values())).budget > 2**20

    @pytest.mark.parametrize(
        "budget", [0, -1, "8 bananas", "", None, True, float("nan"), float("inf"), -0.5, 1.0, 1.5, "0.5"]
    )
    def test_nonsense_is_refused_where_it_is_written(self, budget):
        with pytest.raises((ValueError, TypeError)):
            rg.Auto(budget)

    def test_it_is_for_whole_programs(self):
        with pytest.raises(TypeError, match="policy must be one that an update can have"):
            rg.Update("a", torch.sin, "b", policy=rg.Auto("1GiB"))


class Products(TorchDispatchMode):
    """Counts matrix products in a forward or a replay."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return func(*args, **(kwargs or {}))


class TestSaveOutput:
    """`save="output"`: a replay ends with the last tensor that is saved."""

    @staticmethod
    def products(policy) -> int:
        net, x = network(depth=3, policy=policy), torch.randn(2, 6, 16, requires_grad=True)
        loss = net(x).sum()
        with Products() as products:
            loss.backward()
        return products.count

    def test_the_last_product_of_each_fn_is_not_run_again(self):
        kept = self.products(rg.Keep())
        assert self.products(rg.Reverse()) == kept + 3 * 4  # two of the attention, two of the feed-forward
        assert self.products(rg.Reverse(save="output")) == kept + 3 * 2

    def test_it_costs_the_outputs(self):
        peaks = [
            peak_bytes(network(depth, policy=rg.Reverse(save="output")), torch.randn(2, 6, 16)) for depth in (4, 12)
        ]
        assert peaks[1] - peaks[0] == 2 * 8 * (2 * 6 * 16 * 4)

    @pytest.mark.parametrize("again", [False, True])
    def test_outputs_are_let_go_of_as_the_backward_goes_on(self, again):
        """All but the first update's, which waits for this hook; with `retain_graph` none."""
        net, x = network(depth=4, policy=rg.Reverse(save="output")), torch.randn(2, 6, 16, requires_grad=True)
        with LiveBytes() as memory:
            loss = net(x).square().mean()
            held: list[int] = []
            x.register_hook(lambda grad: held.append(memory.live))
            before = memory.live
            torch.autograd.grad(loss, x, retain_graph=again)
        output = 2 * 6 * 16 * 4
        assert (before - held[0] > 5 * output) is not again

    def test_a_second_backward(self):
        net, x = network(policy=rg.Reverse(save="output")).double(), torch.randn(2, 6, 16, dtype=torch.double)
        loss = net(x).sin().sum()
        first = torch.autograd.grad(loss, [*net.parameters()], retain_graph=True)
        with Products() as products:
            second = torch.autograd.grad(loss, [*net.parameters()])
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b)
        assert products.count == self.products(rg.Reverse(save="output")) // 3 * 4  # four blocks, not three

    def test_where_they_are_gone_all_is_replayed(self):
        """A first pass goes on to the input and frees the graph; a second one wants a weight that it left out."""
        linear, x = nn.Linear(4, 4).double(), torch.randn(3, 4, dtype=torch.double, requires_grad=True)

        def grads(policy):
            def fn(b):
                return linear(b.sin()).sin()

            out = rg.run([rg.Update("a", fn, "b"), rg.Update("b", fn, "a")], {"a": x, "b": x}, policy=policy)
            loss = (out["a"] * out["b"]).sum()
            found = torch.autograd.grad(loss, x, create_graph=True)
            return torch.autograd.grad(found[0].square().sum(), [x, *linear.parameters()])

        for a, b in zip(grads(rg.Reverse(save="output")), grads(rg.Keep()), strict=True):
            torch.testing.assert_close(a, b)

    def test_an_output_that_is_changed_afterwards_is_not_used(self):
        made: list[torch.Tensor] = []
        x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)

        def kept_aside(b):
            made.append(b.sin())
            return made[-1]

        out = rg.run([rg.Update("a", kept_aside, "b")], {"a": x, "b": x}, policy=rg.Reverse(save="output"))
        with torch.no_grad():
            made[0].zero_()
        torch.testing.assert_close(torch.autograd.grad(out["a"].sum(), x)[0], 1 + x.cos())

    @pytest.mark.parametrize("join", [rg.Affine(), rg.Scale(0.9, 0.5), rg.ExactAdd(), rg.Add()], ids=str)
    def test_with_each_join(self, join):
        class Parts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 8 if join.parts == 2 else 4).double()

            def forward(self, b):
                out = self.linear(b.sin())
                return out.chunk(2, -1) if join.parts == 2 else out

        f, g = Parts(), Parts()
        x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)

        def grads(policy):
            updates = [rg.Update("a", f, "b", join=join), rg.Update("b", g, "a", join=join)] * 3
            out = rg.run(updates, {"a": x, "b": x}, policy=policy)
            return torch.autograd.grad((out["a"] * out["b"]).sum(), [x, *f.parameters(), *g.parameters()])

        for a, b in zip(grads(rg.Reverse(save="output")), grads(rg.Keep()), strict=True):
            torch.testing.assert_close(a, b)

    def test_a_fn_that_saves_nothing_and_a_fn_that_catches_everything(self):
        def careful(b):
            try:
                return b.sin().exp()
            except Exception:
                return b

        x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
        updates = [rg.Update("a", careful, "b"), rg.Update("b", lambda a: a * 2, "a"), rg.Update("a", careful, "b")]
        found = []
        for policy in (rg.Reverse(save="output"), rg.Keep()):
            out = rg.run(updates, {"a": x, "b": x}, policy=policy)
            found.append(torch.autograd.grad((out["a"] * out["b"]).sum(), x)[0])
        torch.testing.assert_close(*found)

    def test_what_the_replay_changes_is_put_back(self):
        """The end of `fn` is not reached, and what comes after the backward is as it was."""
        net = rg.ReversibleSequence(
            [(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)), nn.Tanh())],
            policy=rg.Reverse(save="output"),
        )
        loss = net(torch.randn(8, 4)).sum()
        net.eval()
        random, state = torch.get_rng_state(), copy.deepcopy(net.state_dict())
        loss.backward()
        assert torch.equal(torch.get_rng_state(), random)
        assert not any(module.training for module in net.modules())
        assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())

    def test_compiled_networks(self):
        net, x = network(depth=2), torch.randn(2, 6, 16, requires_grad=True)
        expected = gradients(net, x)
        net.policy = rg.Reverse(save="output")
        for f, g in net.pairs():
            f.compile(backend="aot_eager")
            g.compile(backend="aot_eager")
        for a, b in zip(gradients(net, x), expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("k", [0, -2, 1.5, True, "4"])
def test_a_nonsense_anchor_is_refused_where_it_is_written(k):
    with pytest.raises(ValueError, match="anchor_every must be a positive number"):
        rg.Reverse(anchor_every=k)


@pytest.mark.parametrize("smallest", [-1, 1.5, True, None])
def test_a_nonsense_offload_is_refused_where_it_is_written(smallest):
    with pytest.raises(ValueError, match="smallest must be a number of bytes"):
        rg.Offload(smallest)


def test_sizes():
    assert [parse_bytes(s) for s in ("8GiB", "1.5 kib", "500MB", "7", 7)] == [8 * 2**30, 1536, 500 * 10**6, 7, 7]
    assert [format_bytes(n) for n in (0, 1023, 1536, 2**30, 300 * 2**20)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 GiB",
        "300 MiB",
    ]
    for bad in ("8 bananas", "-1", "", None, 1.5):
        with pytest.raises(ValueError, match="not a size in bytes"):
            parse_bytes(bad)


def test_an_operator_that_alone_draws_may_be_saved():
    """Its output, with what it drew, is stored; nothing is drawn in the replay, so nothing can differ."""

    def fn(x):
        return (x * torch.rand(x.shape)).sin()

    def grads(policy):
        torch.manual_seed(0)
        b = torch.linspace(0, 1, 8, requires_grad=True)
        out = rg.run([rg.Update("a", fn, "b"), rg.Update("b", fn, "a")], {"a": b, "b": b}, policy=policy)
        return torch.autograd.grad(out["b"].sum(), b)[0]

    torch.testing.assert_close(grads(rg.Reverse(save="aten.rand")), grads(rg.Keep()))


def test_no_operators_to_save_are_refused_where_they_are_written():
    with pytest.raises(ValueError, match="names no operator"):
        rg.Reverse(save=[])
