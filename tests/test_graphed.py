"""A training step in a CUDA graph: what it computes is what the step computes without one."""

import copy
import re

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.capture import Rehearsal, under_way


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda():
    with pytest.raises(RuntimeError, match="graphed needs a CUDA device"):
        rg.graphed(lambda: None)


def test_bad_arguments():
    with pytest.raises(TypeError, match="step must be a function"):
        rg.graphed("step")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="warmup must be at least 1"):
        rg.graphed(lambda: None, warmup=0)


class Still:
    """A generator on a device that is not there."""

    def get_offset(self) -> int:
        return 0


@pytest.mark.parametrize("fn", [nn.Tanh(), torch.tanh])
def test_a_rehearsal_notes_every_call(fn):
    with under_way(rehearsal := Rehearsal(Still())):  # type: ignore[arg-type]
        rg.run([rg.Update("a", fn, "b"), rg.Update("b", fn, "a")], {"a": torch.randn(2), "b": torch.randn(2)})
    assert rehearsal.offsets == [None, None]


def test_what_works_on_the_host_is_refused():
    net = rg.ReversibleSequence([(nn.Tanh(), nn.Tanh())], policy=rg.Offload())
    with under_way(Rehearsal(Still())):  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match=r"Offload.*cannot be captured"):
            net(torch.randn(2, 4))
        net.policy = rg.Reverse(watch=1e-3)
        with pytest.raises(RuntimeError, match=re.escape("watch=0.001") + ".*cannot be captured"):
            net(torch.randn(2, 4))


def mlp(dropout: float = 0.2) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 32))


def network(policy: rg.Policy, dropout: float = 0.2, join: rg.Join = rg.ExactAdd()) -> rg.ReversibleSequence:
    torch.manual_seed(0)
    return rg.ReversibleSequence([(mlp(dropout), mlp(0.0)) for _ in range(4)], join=join, policy=policy).cuda()


def step_of(net: nn.Module, optimizer: torch.optim.Optimizer | None = None):
    def step(x):
        net.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(x).square().mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    return step


def gradients(net: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in net.parameters()]


def assert_equal(seen, expected) -> None:
    assert len(seen) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnCuda:
    @pytest.mark.parametrize("policy", [rg.Reverse(), rg.Keep(), rg.Reverse(anchor_every=3), rg.Auto("1MiB")], ids=str)
    def test_equals_the_step_itself_to_the_bit_with_dropout(self, policy):
        net = network(policy)
        step, x = step_of(net), torch.randn(8, 32, device="cuda")
        launch = rg.graphed(step, x)
        launched = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            for _ in range(2):  # the second launch goes on drawing where the first ended
                launched.append((launch(x).clone(), gradients(net)))
        for at, seed in ((0, 1), (4, 2)):
            torch.manual_seed(seed)
            for loss, found in launched[at : at + 2]:
                assert torch.equal(step(x), loss)
                assert_equal(gradients(net), found)
        losses = [float(loss) for loss, _ in launched]
        assert losses[:2] == losses[2:4]
        assert len(set(losses)) == 4

    def test_training_goes_as_without_a_graph(self):
        nets = [network(rg.Reverse()) for _ in range(2)]
        optimizers = [torch.optim.AdamW(net.parameters(), 1e-2, capturable=True) for net in nets]
        x = torch.randn(8, 32, device="cuda")
        steps = [step_of(net, optimizer) for net, optimizer in zip(nets, optimizers, strict=True)]
        torch.manual_seed(3)
        launch = rg.graphed(steps[0], x, warmup=2)
        for _ in range(4):
            launch(x)
        torch.manual_seed(3)
        for _ in range(6):
            steps[1](x)
        assert_equal(list(nets[0].parameters()), list(nets[1].parameters()))

    def test_a_network_in_a_network(self):
        inner = lambda: rg.ReversibleSequence([(mlp(), mlp())])  # noqa: E731
        torch.manual_seed(0)
        net = rg.ReversibleSequence([(inner(), mlp()), (mlp(), inner())]).double().cuda()
        kept = copy.deepcopy(net)
        for module in kept.modules():
            if isinstance(module, rg.Reversible):
                module.policy = rg.Keep()

        def plain(net):
            def step(x):
                net.zero_grad()
                net(x).square().mean().backward()

            return step

        x = torch.randn(8, 32, device="cuda", dtype=torch.float64)
        launch = rg.graphed(plain(net), x)
        torch.manual_seed(5)
        launch(x)
        torch.manual_seed(5)
        plain(kept)(x)
        for seen, expected in zip(gradients(net), gradients(kept), strict=True):
            torch.testing.assert_close(seen, expected, rtol=1e-9, atol=1e-12)

    def test_remembered_choices_that_draw(self):
        class Choosing(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(32, 32)

            def forward(self, x):
                places = rg.remember(lambda: torch.randperm(32, device=x.device))
                return nn.functional.dropout(self.linear(x)[:, places], 0.3)

        def build(policy):
            torch.manual_seed(0)
            return rg.ReversibleSequence([(Choosing(), Choosing())], join=rg.ExactAdd(), policy=policy).cuda()

        nets, found = [build(rg.Reverse()), build(rg.Keep())], []
        for net in nets:
            x = torch.ones(4, 32, device="cuda")
            launch = rg.graphed(step_of(net), x)
            torch.manual_seed(7)
            for _ in range(3):
                launch(x)
            found.append(gradients(net))
        assert_equal(*found)

    def test_running_statistics_move_once(self):
        def build():
            torch.manual_seed(0)
            return rg.ReversibleSequence([(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Tanh())]).cuda()

        net, plain, x = build(), build(), torch.randn(16, 8, device="cuda")
        launch = rg.graphed(step_of(net), x)
        for _ in range(2):
            launch(x)
        for _ in range(5):
            step_of(plain)(x)
        for seen, expected in zip(net.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(seen, expected)

    def test_leaving_the_range_is_seen(self):
        net = network(rg.Reverse(), join=rg.ExactAdd(range=64))
        launch = rg.graphed(step_of(net), torch.randn(8, 32, device="cuda"))
        launch(torch.full((8, 32), 1e4, device="cuda"))
        with pytest.raises(RuntimeError, match="left the range"):
            launch.synchronize()

    def test_what_cannot_be_captured(self):
        net, x = network(rg.Reverse()), torch.randn(8, 32, device="cuda")
        with pytest.raises(RuntimeError, match="cannot be captured"):
            rg.graphed(lambda x: step_of(net)(x).item(), x)
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match="on the CPU"):
            rg.graphed(lambda x: step_of(net)(x * torch.rand(()).item()), x)
        launch = rg.graphed(step_of(net), x)  # the device is well after all that
        with pytest.raises(ValueError, match="captured for inputs of"):
            launch(x[:4])
        with pytest.raises(ValueError, match="captured for inputs of"):
            launch()
        with pytest.raises(ValueError, match="captured for inputs of"):
            launch(x.double())
        with pytest.raises(ValueError, match="on the current CUDA device"):
            rg.graphed(step_of(net), x.cpu())
        with pytest.raises(ValueError, match="needs a gradient"):
            rg.graphed(step_of(net), x.clone().requires_grad_())

    def test_two_backwards_of_one_forward_that_draws(self):
        def build(dropout):
            net = network(rg.Reverse(), dropout)

            def step(x):
                net.zero_grad()
                loss = net(x).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()

            return step

        x = torch.randn(8, 32, device="cuda")
        rg.graphed(build(0.0), x)(x)
        with pytest.raises(RuntimeError, match="replayed twice in a captured step"):
            rg.graphed(build(0.2), x)

    def test_a_graph_of_the_users_own_says_what_to_use(self):
        net, x = network(rg.Reverse()), torch.randn(8, 32, device="cuda")
        step_of(net)(x)
        torch.cuda.synchronize()
        generator = torch.cuda.default_generators[0]
        spare = generator.clone_state()
        with (
            pytest.raises(RuntimeError, match=re.escape("retrograd.graphed")),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            step_of(net)(x)
        generator.graphsafe_set_state(spare)  # a capture that fails leaves the other one unable to draw
