"""What is measured: the sizes of the networks, by name, and the variations of them that a sweep makes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Configuration:
    """The size of a network and of its input, and how often it is run.

    The gradient check runs `check_blocks` blocks on `check_tokens` tokens where these are given, since kept
    activations may not fit at full size.
    """

    name: str
    width: int
    tokens: int
    batch: int
    blocks: int
    dropout: float = 0.0
    steps: int = 10
    warmups: int = 3
    check_tokens: int | None = None
    check_blocks: int | None = None

    def for_check(self) -> Configuration:
        """The size at which gradients are compared with kept activations."""
        tokens = min(self.tokens, self.check_tokens or self.tokens)
        return replace(self, tokens=tokens, blocks=min(self.blocks, self.check_blocks or self.blocks))

    def with_size(self, axis: str, size: int) -> Configuration:
        """This configuration with another batch, depth, width or length."""
        return replace(self, name=f"{self.name}/{axis}={size}", **{axis: size})

    def as_dict(self) -> dict:
        return asdict(self)


CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        Configuration("tiny", width=64, tokens=64, batch=2, blocks=2),
        Configuration("small", width=128, tokens=256, batch=2, blocks=12, steps=6),
        Configuration("A", width=1024, tokens=2048, batch=8, blocks=24),
        Configuration("B", width=256, tokens=256, batch=8, blocks=48),
        Configuration("B-dropout", width=256, tokens=256, batch=8, blocks=48, dropout=0.1),
        Configuration("C", width=512, tokens=1024, batch=4, blocks=96),
        Configuration("long", width=1024, tokens=32768, batch=1, blocks=8),
        Configuration("depth4", width=1024, tokens=2048, batch=4, blocks=4),
        Configuration("depth16", width=1024, tokens=2048, batch=4, blocks=16),
        Configuration("depth64", width=1024, tokens=2048, batch=4, blocks=64),
        Configuration("deep24", width=512, tokens=1024, batch=4, blocks=24),
        Configuration("deep1000", width=512, tokens=1024, batch=4, blocks=1000, steps=5, warmups=1),
        Configuration("longest", width=1024, tokens=524288, batch=1, blocks=24, steps=1, warmups=0, check_tokens=8192),
    )
}

AXES = {  # what a sweep varies, and the sizes it takes unless told
    "blocks": (4, 16, 64, 256, 1000),
    "tokens": (512, 2048, 8192, 32768),
    "width": (256, 512, 1024, 2048),
    "batch": (1, 2, 4, 8, 16),
}

SPECIAL = {  # runs with contenders of their own: (configurations, contenders)
    "deep": (("deep24", "deep1000"), ("kept", "checkpoint", "reverse", "exact", "revlib")),
    "longest": (("longest",), ("reverse", "reverse-attention")),
}


def sweep(configuration: Configuration, axis: str, sizes: tuple[int, ...]) -> list[Configuration]:
    """The same network at several sizes."""
    return [configuration.with_size(axis, size) for size in sizes]
