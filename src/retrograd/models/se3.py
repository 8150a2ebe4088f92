"""An SE(3)-equivariant attention network on particles: turn or move the input, and the output turns with it.

Features are dictionaries of degrees, `{degree: (batch, particles, channels, 2 * degree + 1)}`: degree 0 is a number,
degree 1 a vector (x, y, z), degree 2 the five components of a symmetric traceless matrix. Both streams of the blocks
are such dictionaries. Attention is that of SE(3)-Transformers (Fuchs et al., 2020). A message is the neighbour's
features times spherical harmonics of the direction to it, times learned functions of the distance (tensor field
networks: Thomas et al., 2018). Weights are scalar products of queries and keys over all degrees: no rotation changes
them. Spherical harmonics and Wigner's 3j symbols are those of e3nn.

SE(3) is rotations and translations, not reflections: degrees carry no parity, cross products are allowed, and a system
and its mirror image are different to the network. Needs e3nn: `pip install 'retrograd[se3]'`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn

import retrograd as rg

try:
    from e3nn import o3
    from e3nn.math import soft_one_hot_linspace
except ImportError as error:
    raise ImportError("retrograd.models.se3 needs e3nn: pip install 'retrograd[se3]'") from error

Features = dict[int, Tensor]
"""Inside the network {degree: (B, N, 2 * degree + 1, C)}: channels last, since linear maps mix them."""

RADIAL = 16  # Gaussians between distance zero and the cutoff, from which the learned functions of distance are made


class SE3Transformer(nn.Module):
    """Features and coordinates (batch, particles, 3) to features: `inputs` and `outputs` are {degree: channels}.

    `depth` blocks have `width` channels of every degree up to `max_degree`. A particle attends to its nearest
    `neighbours` (all unless told) within `cutoff`; what is further away has no influence, and a particle that
    comes near fades in. One without neighbours in reach hears nothing, so padding belongs far away.

    >>> model = SE3Transformer({0: 1, 1: 1}, {1: 1}, depth=2, width=8, heads=2, cutoff=5.0)  # charge, velocity -> force
    >>> charges, velocities, coordinates = torch.randn(4, 6, 1, 1), torch.randn(4, 6, 1, 3), torch.randn(4, 6, 3)
    >>> forces = model({0: charges, 1: velocities}, coordinates)[1]
    >>> forces.shape
    torch.Size([4, 6, 1, 3])
    >>> turn = o3.rand_matrix()
    >>> turned = model({0: charges, 1: velocities @ turn.T}, coordinates @ turn.T + 1.0)[1]
    >>> torch.allclose(turned, forces @ turn.T, atol=1e-4)
    True
    """

    def __init__(
        self,
        inputs: Mapping[int, int],
        outputs: Mapping[int, int],
        *,
        depth: int,
        width: int,
        cutoff: float,
        heads: int = 4,
        max_degree: int = 1,
        neighbours: int | None = None,
        policy: rg.Policy = rg.Reverse(),
        join: rg.Join = rg.Add(),
    ) -> None:
        super().__init__()
        named = {"depth": depth, "width": width, "heads": heads, "neighbours": 1 if neighbours is None else neighbours}
        for name, value in named.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"SE3Transformer: {name} must be a positive whole number, not {value!r}")
        if width % heads:
            raise ValueError(f"SE3Transformer: width {width} must be a multiple of the {heads} heads")
        if not 0 < cutoff < math.inf:
            raise ValueError(f"SE3Transformer: cutoff must be a positive finite distance, not {cutoff!r}")
        for name, channels in (("inputs", inputs), ("outputs", outputs)):
            if not channels or any(d not in range(max_degree + 1) or c < 1 for d, c in channels.items()):
                raise ValueError(
                    f"SE3Transformer: {name} must be {{degree: channels}} with degrees up to max_degree ({max_degree}) "
                    f"and at least one channel each, not {dict(channels)!r}"
                )
        self.inputs, self.max_degree, self.width = dict(inputs), max_degree, width
        self.cutoff, self.neighbours = cutoff, neighbours
        hidden = dict.fromkeys(range(max_degree + 1), width)
        self.embed = Mix(inputs, hidden)
        self.blocks = rg.ReversibleSequence(
            [(Attention(hidden, heads), FeedForward(hidden)) for _ in range(depth)], policy=policy, join=join
        )
        self.head = Mix(hidden, outputs)
        self.initialise(depth)

    @torch.no_grad()
    def initialise(self, depth: int) -> None:
        """Unit variance after each matrix, except that what the blocks add sums up to about one at any depth."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        for network in (network for pair in self.blocks.pairs() for network in pair):
            for weight in network.out.parameters():  # type: ignore[union-attr]
                weight /= math.sqrt(2 * depth)

    def forward(self, features: Mapping[int, Tensor], coordinates: Tensor) -> Features:
        self.refuse(features, coordinates)
        batch, particles, _ = coordinates.shape
        x = {
            degree: coordinates.new_zeros(batch, particles, 2 * degree + 1, self.width)
            for degree in range(self.max_degree + 1)
        }
        for degree, embedded in self.embed({degree: features[degree].mT for degree in self.inputs}).items():
            x[degree] = embedded.to(coordinates.dtype)  # the streams stay in full precision under autocast
        x = self.blocks(x, edges=self.edges(coordinates))
        return {degree: out.mT for degree, out in self.head(x).items()}

    def edges(self, coordinates: Tensor) -> Edges:
        """What attention needs to know of the geometry: the same for every block, and chosen outside of them, since a
        replay might choose other neighbours where two are equally near."""
        batch, particles, _ = coordinates.shape
        with torch.no_grad():
            distances = torch.cdist(coordinates, coordinates, compute_mode="donot_use_mm_for_euclid_dist")
            distances.diagonal(dim1=1, dim2=2).fill_(torch.inf)
            number = min(self.neighbours or particles, particles - 1)
            nearest = distances.topk(number, largest=False, sorted=False).indices  # (B, N, K)
            senders = nearest + particles * torch.arange(batch, device=nearest.device).view(-1, 1, 1)
        away = gather(coordinates, senders) - coordinates.unsqueeze(2)  # (B, N, K, 3)
        distance = away.norm(dim=-1)
        reach = (1 + torch.cos(math.pi * (distance / self.cutoff).clamp(max=1))) / 2  # 1 here, 0 at the cutoff, smooth
        radial = soft_one_hot_linspace(distance, 0.0, self.cutoff, RADIAL, basis="gaussian", cutoff=False)
        radial = radial * math.sqrt(RADIAL)  # of mean square 1
        orders = range(2 * self.max_degree + 1)
        harmonics = o3.spherical_harmonics(list(orders), away, normalize=True, normalization="component")
        by_order = harmonics.split([2 * order + 1 for order in orders], dim=-1)
        pairs = [(source, target) for target in range(self.max_degree + 1) for source in range(self.max_degree + 1)]
        kernels = {pair: self.kernel(*pair, by_order) for pair in pairs}
        return Edges(senders, reach, radial, kernels)

    def kernel(self, source: int, target: int, harmonics: tuple[Tensor, ...]) -> Tensor:
        """The J linear maps from degree `source` to degree `target` that turn with the direction to a neighbour: one
        for each order of harmonics that couples the two. Scaled so that messages have about the size of features."""
        maps = []
        for order in range(abs(source - target), source + target + 1):
            coupling = wigner_3j(target, source, order).to(harmonics[order])
            maps.append(torch.einsum("tsj,bnkj->bnkts", coupling, harmonics[order]))
        into_target = sum(2 * min(target, other) + 1 for other in range(self.max_degree + 1))
        return torch.stack(maps, dim=3) * math.sqrt((2 * target + 1) / into_target)

    def refuse(self, features: Mapping[int, Tensor], coordinates: Tensor) -> None:
        """An error for what the model cannot take."""
        if coordinates.dim() != 3 or coordinates.shape[-1] != 3:
            raise ValueError(f"coordinates must be (batch, particles, 3), not {tuple(coordinates.shape)}")
        if coordinates.shape[1] < 2:
            raise ValueError("a single particle has no neighbours to attend to; the model needs at least two")
        if features.keys() != self.inputs.keys():
            raise ValueError(f"features must have the degrees {list(self.inputs)}, as integers, not {list(features)}")
        for degree, channels in self.inputs.items():
            expected = (*coordinates.shape[:2], channels, 2 * degree + 1)
            if features[degree].shape != expected:
                raise ValueError(
                    f"features of degree {degree} must be (batch, particles, channels, {2 * degree + 1}), for these "
                    f"coordinates {expected}, not {tuple(features[degree].shape)}"
                )


@functools.cache
def wigner_3j(*degrees: int) -> Tensor:
    """The symbols in float64, from a thread of its own: e3nn keeps them for all that comes, so they must not be fake
    tensors of a mode that this thread is in (`retrograd.plan`)."""
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(o3.wigner_3j, *degrees, dtype=torch.float64).result()


class Edges(NamedTuple):
    """From each particle to its K neighbours."""

    senders: Tensor  # (B, N, K): the neighbour, as a row of all B * N particles
    reach: Tensor  # (B, N, K): 1 where they touch, 0 from the cutoff on
    radial: Tensor  # (B, N, K, RADIAL): functions of the distance
    kernels: dict[tuple[int, int], Tensor]  # {(source, target): (B, N, K, J, 2 target + 1, 2 source + 1)}


def gather(x: Tensor, senders: Tensor) -> Tensor:
    """The rows of x (B, N, ...) that are the neighbours: (B, N, K, ...)."""
    return x.flatten(0, 1).index_select(0, senders.flatten()).unflatten(0, senders.shape)


class Mix(nn.Module):
    """Mixes the channels of each degree. No other linear map of one particle's features commutes with rotations, and
    only numbers (degree 0) may be shifted."""

    def __init__(self, inputs: Mapping[int, int], outputs: Mapping[int, int]) -> None:
        super().__init__()
        both = [degree for degree in outputs if degree in inputs]
        self.maps = nn.ModuleDict({str(d): nn.Linear(inputs[d], outputs[d], bias=d == 0) for d in both})

    def forward(self, x: Features) -> Features:
        return {int(degree): linear(x[int(degree)]) for degree, linear in self.maps.items()}


class Norm(nn.Module):
    """Divides a particle's features by their root mean square over channels, components and degrees, which no rotation
    changes; so what is larger, numbers or vectors, remains."""

    def __init__(self, hidden: Mapping[int, int]) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(width) for width in hidden.values()])

    def forward(self, x: Features) -> Features:
        squares = torch.stack([each.square().mean((2, 3), keepdim=True) for each in x.values()])
        factor = (squares.mean(0) + 1e-5).rsqrt()  # (B, N, 1, 1)
        return {degree: each * factor * self.scales[degree] for degree, each in x.items()}


class Attention(nn.Module):
    """Attention to neighbours. Keys and values are messages along edges, queries are features of the receiver."""

    def __init__(self, hidden: dict[int, int], heads: int) -> None:
        super().__init__()
        twice = {degree: 2 * width for degree, width in hidden.items()}
        self.heads, self.norm = heads, Norm(hidden)
        self.query, self.key_value, self.out = Mix(hidden, hidden), Mix(hidden, twice), Mix(hidden, hidden)
        maps = sum(2 * min(source, target) + 1 for source in hidden for target in hidden)
        self.radial = nn.Sequential(nn.Linear(RADIAL, twice[0]), nn.SiLU(), nn.Linear(twice[0], maps * twice[0]))

    def forward(self, x: Features, edges: Edges) -> Features:
        x = self.norm(x)
        sent = {degree: gather(each, edges.senders) for degree, each in self.key_value(x).items()}
        strengths = self.radial(edges.radial).unflatten(-1, (-1, sent[0].shape[-1]))  # (B, N, K, sum of J, 2 C)
        strengths = strengths.split([kernel.shape[3] for kernel in edges.kernels.values()], dim=3)
        received: dict[int, list[Tensor]] = {degree: [] for degree in x}
        for ((source, target), kernel), strength in zip(edges.kernels.items(), strengths, strict=True):
            turned = (kernel.flatten(3, 4) @ sent[source]).unflatten(3, kernel.shape[3:5])  # (B, N, K, J, 2 t + 1, 2 C)
            received[target].append((turned * strength.unsqueeze(4)).sum(3))
        # M is all components of all degrees, H are heads and D the channels of each
        messages = torch.cat([torch.stack(parts).sum(0) for parts in received.values()], dim=3)  # (B, N, K, M, 2 C)
        key, value = messages.unflatten(-1, (2, self.heads, -1)).unbind(4)  # (B, N, K, M, H, D)
        query = torch.cat([*self.query(x).values()], dim=2).unflatten(-1, (self.heads, -1))  # (B, N, M, H, D)
        weights = self.weights(query, key, edges.reach)  # (B, N, K, H)
        heard = (weights.unsqueeze(3).unsqueeze(5) * value).sum(2).flatten(3)  # (B, N, M, C)
        return self.out(dict(zip(x, heard.split([each.shape[2] for each in x.values()], dim=2), strict=True)))

    @staticmethod
    def weights(query: Tensor, key: Tensor, reach: Tensor) -> Tensor:
        """A softmax over neighbours and silence, which has the logit 0. Each neighbour counts as far as it is in reach,
        so that one at the cutoff changes nothing."""
        logits = (query.unsqueeze(2) * key).sum((3, 5)) / math.sqrt(key.shape[3] * key.shape[5])
        highest = logits.detach().amax(2, keepdim=True).clamp_min(0)  # exp cannot overflow
        unnormed = reach.unsqueeze(-1) * (logits - highest).exp()
        return unnormed / (unnormed.sum(2, keepdim=True) + (-highest).exp())


class FeedForward(nn.Module):
    """Widens each degree and gates its channels by functions of the invariants: the numbers, and the squares of the
    others."""

    def __init__(self, hidden: dict[int, int]) -> None:
        super().__init__()
        twice = {degree: 2 * width for degree, width in hidden.items()}
        self.norm, self.up, self.out = Norm(hidden), Mix(hidden, twice), Mix(twice, hidden)
        self.gates = nn.Linear(sum(twice.values()), sum(twice.values()))

    def forward(self, x: Features) -> Features:
        x = self.up(self.norm(x))
        squares = [each.square().mean(2, keepdim=True) for degree, each in x.items() if degree > 0]
        gates = self.gates(torch.cat([x[0], *squares], dim=-1)).sigmoid().chunk(len(x), dim=-1)  # of (B, N, 1, 2 C)
        return self.out({degree: each * gate for (degree, each), gate in zip(x.items(), gates, strict=True)})
