"""`Reverse(graphed=True)` on a CUDA device: against the same replays without graphs, bit for bit."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

import retrograd as rg
from graphs import equal, ways
from retrograd import launch
from test_cuda import WIDTH, Attention, network, tokens

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

GRAPHED = rg.Reverse(graphed=True)
PLAIN = rg.Reverse()


def launches(net: nn.Module) -> int:
    """How many updates have a graph."""
    return sum(way.launch is not None for way in ways(net))


def gradients(net, x, policy, seed: int = 1, autocast: torch.dtype | None = torch.bfloat16):
    net.policy = policy
    torch.manual_seed(seed)
    with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
        loss = net(x).float().square().mean()
    return torch.autograd.grad(loss, [x, *net.parameters()], allow_unused=True)


def private_bytes() -> int:
    """What the allocator holds for graphs."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))


@pytest.fixture(autouse=True)
def _one_order_of_sums():
    """Kernels whose backward gives the same bits twice."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("join", [rg.Add(), rg.Scale(1.0, 0.5), rg.ExactAdd()], ids=str)
def test_training(join, dropout, autocast):
    nets = [network(4, dropout, join=join)]
    nets.append(copy.deepcopy(nets[0]))
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-3) for net in nets]
    for step in range(8):
        x = tokens()
        for net, policy, optimizer in zip(nets, (GRAPHED, PLAIN), optimizers, strict=True):
            for weight, gradient in zip(net.parameters(), gradients(net, x, policy, step, autocast)[1:], strict=True):
                weight.grad = gradient
            optimizer.step()
        assert equal(*(net.parameters() for net in nets))
    assert launches(nets[0]) == 8


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_of_every_kind(backend, dropout):
    net, x, graphs = network(3, dropout), tokens(128), 6
    if backend == "EFFICIENT_ATTENTION" and dropout:  # it saves on the host what it drew
        warnings.filterwarnings("ignore", "update . .*fn Attention.* saves on the host which ones")
        graphs = 3
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
        for step in range(5):
            plain, again, graphed = (gradients(net, x, policy, step) for policy in (PLAIN, PLAIN, GRAPHED))
            for a, b, other in zip(graphed, plain, again, strict=True):
                assert (a - b).norm() <= 3 * (b - other).norm() + 1e-6 * b.norm()
    assert launches(net) == graphs


class First(nn.Module):
    """Of what a module returns, the first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class Itself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "convolution": lambda: nn.Conv1d(64, 64, 3, padding=1),
    "groups": lambda: nn.Sequential(nn.GroupNorm(4, 64), nn.Conv1d(64, 64, 3, padding=1, groups=4), nn.SiLU()),
    "rms": lambda: nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Softplus()),
    "glu": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU(), nn.PReLU(), nn.LeakyReLU()),
    "softmax": lambda: nn.Sequential(nn.Softmax(-1), nn.Hardtanh(), nn.Dropout(0.2), nn.ELU()),
    "norm": lambda: nn.Sequential(nn.InstanceNorm1d(64), nn.Tanh(), nn.Sigmoid()),
    "attention": Itself,
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, norm_first=True),
    "gru": lambda: First(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer, autocast, monkeypatch):
    monkeypatch.setattr(launch, "_warned", set())
    torch.manual_seed(0)
    net = rg.ReversibleSequence([(LAYERS[layer](), LAYERS[layer]()) for _ in range(2)]).cuda()
    x = tokens()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(5):
            pairs = zip(*(gradients(net, x, policy, step, autocast) for policy in (GRAPHED, PLAIN)), strict=True)
            for a, b in pairs:
                assert a is b is None or (a - b).norm() <= 1e-6 * b.norm(), layer

    assert launches(net) == 4 or any("without a CUDA graph" in str(each.message) for each in told)
    if layer in ("linear", "convolution", "groups", "rms", "glu", "softmax", "in place"):
        assert launches(net) == 4


def test_what_waits_for_the_device_says_so():
    class Waits(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2.0 if x.mean().item() > 1e9 else 1.0)

    net, x = rg.ReversibleSequence([(Waits(WIDTH, WIDTH), nn.Tanh())]).cuda(), tokens()

    def train() -> bool:
        return all(equal(gradients(net, x, GRAPHED), gradients(net, x, PLAIN)) for _ in range(4))

    with pytest.warns(UserWarning, match="fn Waits.*it waits for the device"):
        assert train()
    assert launches(net) == 1


def test_a_capture_that_fails():
    """It says so, and everything else works as before."""

    class Waits(nn.Linear):
        def forward(self, x):
            torch.cuda.synchronize()
            return super().forward(x)

    x, good = tokens(), network(2, 0.2)
    bad = rg.ReversibleSequence([(nn.Dropout(0.5), Waits(WIDTH, WIDTH))]).cuda()
    gradients(bad, x, GRAPHED)
    with pytest.raises(RuntimeError, match=r"update 1 .*fn Waits.* cannot be captured in a CUDA graph; give it policy"):
        gradients(bad, x, GRAPHED)
    for seed in range(4):
        assert equal(gradients(bad, x, PLAIN, seed), gradients(bad, x, PLAIN, seed))
        assert equal(gradients(good, x, GRAPHED, seed), gradients(good, x, PLAIN, seed))
    assert launches(good) == 4


def test_a_backward_inside_a_backward():
    net, x = network(4), tokens()
    for _ in range(3):
        gradients(net, x, GRAPHED)
    expected, inner = gradients(net, x, PLAIN), gradients(net, x, PLAIN, seed=7)
    found = []

    def again(gradient):
        if not found:
            found.append(None)
            with torch.enable_grad():
                found[0] = gradients(net, x.detach().requires_grad_(), GRAPHED, seed=7)

    handle = [module for module in net.modules() if isinstance(module, Attention)][2].out.bias.register_hook(again)
    assert equal(gradients(net, x, GRAPHED), expected)
    handle.remove()
    assert equal(found[0][1:], inner[1:])


def test_another_stream():
    """Graphs on another stream have an arena of their own."""
    net, x = network(4), tokens()
    torch.cuda.synchronize()
    expected = gradients(net, x, PLAIN)
    aside = torch.cuda.Stream()
    for _ in range(4):
        assert equal(gradients(net, x, GRAPHED), expected)
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            there = gradients(net, x, GRAPHED)
        torch.cuda.current_stream().wait_stream(aside)
        assert equal(there, expected)
    assert launches(net) == 16


def test_memory():
    """What graphs hold does not grow with depth, and goes with the module."""
    held = []
    for depth in (4, 32):
        gc.collect()
        torch.cuda.empty_cache()
        before = private_bytes()
        net, x = network(depth), tokens(512)
        for _ in range(4):
            gradients(net, x, GRAPHED)
        assert launches(net) == 2 * depth
        torch.cuda.synchronize()
        held.append(private_bytes() - before)
        del net
    gc.collect()
    torch.cuda.empty_cache()
    assert private_bytes() <= before
    assert held[0] == held[1] > 0


def test_no_gradient_lies_where_graphs_write():
    net, x = network(3), tokens()
    for _ in range(4):
        found = gradients(net, x, GRAPHED)
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    for gradient in found:
        where = gradient.data_ptr()
        assert not any(s["address"] <= where < s["address"] + s["total_size"] for s in segments)


def test_in_a_captured_step():
    """`graphed` captures the whole step, and with it ordinary replays."""
    net, x = network(3, 0.1, policy=GRAPHED), tokens()
    data = x.detach()

    def step(x):
        net.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss.detach()

    train = rg.graphed(step, data, warmup=5)
    torch.manual_seed(3)
    loss = train(data).clone()
    found = [weight.grad.clone() for weight in net.parameters()]
    net.policy = PLAIN
    torch.manual_seed(3)
    assert torch.equal(step(data), loss)
    for a, b in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of matrix products in float32
def test_compiled_functions():
    net, x = network(3), tokens()
    for fn in net.modules():
        if isinstance(fn, (Attention, nn.Sequential)):
            fn.compile()
    for step in range(5):
        for a, b in zip(gradients(net, x, GRAPHED, step), gradients(net, x, PLAIN, step), strict=True):
            torch.testing.assert_close(a, b)
    assert launches(net) == 6


def test_generators_are_left_where_they_were():
    net, x = network(3, 0.2, policy=GRAPHED), tokens()
    for _ in range(4):
        loss = net(x).sum()
        before = torch.cuda.get_rng_state()
        loss.backward()
        assert torch.equal(torch.cuda.get_rng_state(), before)
    assert launches(net) == 6


def test_no_synchronisation_in_the_step():
    net, x = network(4, 0.1, policy=GRAPHED), tokens()
    for _ in range(3):
        gradients(net, x, GRAPHED)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        net(x).square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
