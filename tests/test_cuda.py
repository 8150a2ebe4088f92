"""What only a CUDA device can show. Skipped where there is none; run by hand there: `pytest tests/test_cuda.py`."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import retrograd as rg
from retrograd.rounding import rounded_add

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]

WIDTH = 128


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.project(self.norm(x)).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(batch, length, WIDTH))


def network(depth: int, dropout: float = 0.0, **options):
    torch.manual_seed(0)

    def feed_forward():
        return nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    return rg.ReversibleSequence([(Attention(dropout), feed_forward()) for _ in range(depth)], **options).cuda()


def gradients(net, x, policy, autocast=torch.bfloat16):
    net.policy = policy
    torch.manual_seed(1)
    with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
        loss = net(x).square().mean()
    return torch.autograd.grad(loss, [x, *net.parameters()])


def tokens(length: int = 64):
    return torch.randn(2, length, WIDTH, device="cuda", requires_grad=True)


def peak_bytes(net, x) -> int:
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for measured in (False, True):
        if measured:
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(x).square().mean()
        loss.backward()
        del loss
    return torch.cuda.max_memory_allocated() - base


@pytest.fixture
def deterministic(monkeypatch):
    """Kernels whose backward gives the same bits twice; otherwise not even kept activations equal kept activations."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (7,), (16,), (33, 5), (1 << 20,)], ids=str)
@pytest.mark.parametrize("gain", [1.0, -1.0, 2.0, 0.3])
def test_the_kernel_gives_the_bits_of_the_plain_operators(out, shape, gain):
    target, given = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda").to(out)
    flag = torch.zeros(3, dtype=torch.bool, device="cuda")[1]
    plain = torch.add(target, (given.float() * (gain * 2**13)).round_(), alpha=2**-13)
    assert torch.equal(rounded_add(target, given, 2**-13, gain, flag, 2048.0), plain)
    assert not flag
    rounded_add(torch.full_like(target, 4096.0), given, 2**-13, gain, flag, 2048.0)
    assert flag


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [2**22 - 1, 2**22, 2**22 + 5])
def test_sums_have_the_bits_of_the_plain_operators(dtype, size):
    target, out = torch.randn(size, device="cuda"), torch.randn(size, device="cuda").to(dtype)
    for _ in range(2):  # the second launch is another path
        with torch.no_grad():
            assert torch.equal(rg.Add().apply(target, out), target + out)
            assert torch.equal(rg.Add().invert(target, out), target - out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("method", ["apply", "invert"])
def test_sums_of_large_tensors_are_differentiable_twice(dtype, method):
    target, out = torch.randn(2**22, device="cuda"), torch.randn(2**22, device="cuda").to(dtype)
    plain = {"apply": torch.add, "invert": torch.sub}[method]
    for needed in ((True, True), (True, False), (False, True)):
        found = []
        for join in (getattr(rg.Add(), method), plain):
            inputs = [leaf.detach().requires_grad_(need) for leaf, need in zip((target, out), needed, strict=True)]
            wanted = [leaf for leaf in inputs if leaf.requires_grad]
            first = torch.autograd.grad(join(*inputs).pow(3).sum(), wanted, create_graph=True)
            found.append([*first, *torch.autograd.grad(sum(g.float().square().sum() for g in first), wanted)])
        assert all(map(torch.equal, *found))
        assert [g.dtype for g in found[0]] == [g.dtype for g in found[1]]


@pytest.mark.parametrize("join", [rg.Add(), rg.ExactAdd()])
def test_transforms_and_fake_tensors_do_not_meet_the_kernels(join):
    net = rg.ReversibleSequence([(nn.Linear(8, 8), nn.Tanh())], join=join).cuda()
    weights = dict(net.named_parameters())

    def loss(weights, x):
        return torch.func.functional_call(net, weights, (x,)).square().sum()

    x = torch.randn(3, 8, device="cuda")
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    whole = torch.func.grad(loss)(weights, x)
    for name, gradient in whole.items():
        torch.testing.assert_close(each[name].sum(0), gradient)
    assert rg.plan(lambda: rg.ReversibleSequence([(nn.Linear(8, 8), nn.Tanh())], join=join), x).rows


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("depth", [8, 96])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_exact_gradients_equal_kept_ones_to_the_bit(autocast, depth, dropout):
    net, x = network(depth, dropout, join=rg.ExactAdd()), tokens()
    expected, again = (gradients(net, x, rg.Keep(), autocast) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True)), "the kernels are not deterministic"
    found = gradients(net, x, rg.Reverse(), autocast)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_exact_reconstruction_with_flash_attention():
    """Whatever the backward of attention does, the streams come back to the bit."""
    net = network(96, 0.1, join=rg.ExactAdd())
    gradients(net, tokens(), rg.Reverse(watch=1e-9, on_drift="raise"))
    assert rg.last_drift() == 0.0


def test_leaving_the_range_raises_in_the_backward():
    net = network(4, join=rg.ExactAdd(range=1))
    loss = net(tokens()).sum()
    with pytest.raises(RuntimeError, match="left the range"):
        loss.backward()


@pytest.mark.parametrize(
    "policy",
    [
        rg.Reverse(),
        rg.Reverse(anchor_every=3),
        rg.Reverse(save="output"),
        rg.Reverse(save="attention"),
        rg.Offload(0),
        rg.Auto("1GiB"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gradients_equal_kept_ones(policy, dropout):
    net, x = network(6, dropout), tokens()
    expected = gradients(net, x, rg.Keep())
    for _ in range(2):
        for a, b in zip(gradients(net, x, policy), expected, strict=True):
            assert (a - b).norm() <= 2e-2 * b.norm() + 1e-6


def test_memory_does_not_grow_with_depth():
    assert peak_bytes(network(4), tokens()) == peak_bytes(network(32), tokens())


def test_offload_moves_activations_off_the_device():
    kept, offloaded = (peak_bytes(network(16, policy=p), tokens(512)) for p in (rg.Keep(), rg.Offload(0)))
    assert offloaded < kept / 2


def test_the_generator_is_where_kept_activations_leave_it():
    net, x = network(4, 0.2), tokens()
    gradients(net, x, rg.Keep())
    expected = torch.cuda.get_rng_state()
    gradients(net, x, rg.Reverse())
    assert torch.equal(torch.cuda.get_rng_state(), expected)


def test_no_synchronisation_in_the_step():
    """With the streams and the checks of ExactAdd and watch."""
    net, x = network(4, join=rg.ExactAdd()), tokens()
    for policy in (rg.Reverse(), rg.Reverse(watch=1e-3)):
        gradients(net, x, policy)
        torch.cuda.synchronize()
        net.policy = policy
        torch.cuda.set_sync_debug_mode("error")
        try:
            net(x).square().mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
