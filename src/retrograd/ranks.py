"""Programs that are drawn at random, on ranks that share weights.

FSDP2 and tensor parallelism gather a block's weights on every rank when the block runs. If ranks run different blocks,
their collectives meet crosswise: a hang, or the weights of another block, without an error. So ranks that hold parts of
the same weights draw which blocks to drop together, and a program that a user has drawn is compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .surroundings import state

if TYPE_CHECKING:
    from .update import Update


def distributed() -> bool:
    """Whether this process has a rank."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def agreed(draws: Tensor, networks: Iterable[nn.Module]) -> Tensor:
    """The same draws on all ranks that hold parts of these networks: those of the first."""
    for mesh in _meshes(networks) if distributed() else []:
        draws = draws.to(mesh.device_type)
        for group in mesh.get_all_groups():
            torch.distributed.broadcast(draws, group_src=0, group=group)
    return draws.cpu()


class Drawn:
    """Sees whether describing a program draws random numbers; if so, compares it with those of the other ranks."""

    def __init__(self) -> None:
        self.before = state(torch.default_generator)

    def compare(self, updates: Sequence[Update], module: nn.Module) -> None:
        """Raise on every rank if some run other updates than the rest, by the names of their `fn`s."""
        if state(torch.default_generator) == self.before:
            return
        names = {id(inner): name for name, inner in module.named_modules()}
        text = " ".join(f"{update.target}:{names.get(id(update.fn), update.name)}" for update in updates)
        for mesh in _meshes([module]):  # all of it: a rank that has drawn nothing must take part as well
            rank = torch.distributed.get_rank()
            found = torch.tensor([[rank, zlib.crc32(text.encode())]], device=mesh.device_type)
            for group in mesh.get_all_groups():  # one dimension after the other, until all ranks of the mesh are there
                parts = [torch.empty_like(found) for _ in range(group.size())]
                torch.distributed.all_gather(parts, found, group=group)
                found = torch.cat(parts)
            programs = dict(found.tolist())
            if others := sorted(r for r, digest in programs.items() if digest != programs[min(programs)]):
                raise RuntimeError(
                    f"ranks {others} run other updates than rank {min(programs)}, and their weights are sharded, so "
                    "they would wait for each other or get each other's weights. Draw what is random in updates() from "
                    f"a generator that is seeded alike on every rank (rank {rank} runs {len(updates)} updates)"
                )


def _meshes(networks: Iterable[nn.Module]) -> list[Any]:
    """The meshes over which weights of these networks are sharded, in the same order on every rank."""
    from torch.distributed.tensor import DTensor

    meshes = {p.device_mesh for network in networks for p in network.parameters() if isinstance(p, DTensor)}
    return sorted(meshes, key=lambda mesh: (mesh.ndim, str(mesh.mesh.tolist())))
