"""Models of Hugging Face `transformers` (5.22), on this engine.

`ReformerEncoder` runs the layers of its Reformer (Kitaev et al., 2020), reversible as published, with gradients
wherever autograd is used. `Layers` puts a residual stack that was made reversible (`Midpoint.from_residual`,
`Momentum.from_residual`) where a model has the list of its layers; the weights keep their names. Both take what a model
already holds, so there is nothing for `install()` to swap.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .. import Keep, Midpoint, Momentum, Policy, Reverse, Reversible, Update, remember, run


class ReformerEncoderOutput(NamedTuple):
    """What the published encoder returns."""

    hidden_states: Tensor
    all_hidden_states: list[Tensor]
    all_attentions: list[Any]
    past_buckets_states: Any


class ReformerEncoder(Reversible):
    """The layers of the published encoder on this engine: `model.encoder = ReformerEncoder(model.encoder)`.

    Weights keep their names. Hidden states (`output_hidden_states=True`) carry gradients, and each is stored; attention
    probabilities carry none, as published. In training no cache is made. In eval mode one is made if it is asked for,
    and activations are kept then.
    """

    def __init__(self, encoder: Any, *, policy: Policy = Reverse()) -> None:
        super().__init__(policy=policy)
        self.layers: nn.ModuleList = encoder.layers
        self.layer_norm: nn.Module = encoder.layer_norm
        self.dropout: float = encoder.dropout
        self.training = encoder.training
        # In a tuple: not registered, or weights would have second names. Made once, so that each is compiled once.
        self._attentions = tuple(_Attention(cast(Any, layer).attention) for layer in self.layers)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        num_hashes: int | None = None,
        past_buckets_states: Any = None,
        use_cache: bool = False,
        orig_sequence_length: int | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> ReformerEncoderOutput:
        given: dict[str, Any] = {"attention_mask": attention_mask, "num_hashes": num_hashes}
        caching = use_cache and not self.training
        if caching:
            given["past_buckets_states"] = _new_cache() if past_buckets_states is None else past_buckets_states
            given |= {"use_cache": True, "orig_sequence_length": orig_sequence_length}
        probabilities: list[list[Tensor]] = [[] for _ in self.layers] if output_attentions else []

        depth = len(self.layers)
        ends = range(1, depth + 1) if output_hidden_states else [depth]  # the program is cut at each hidden state
        streams: dict[str, Any] = {"attention": hidden_states, "hidden": hidden_states}
        states, start = [hidden_states], 0
        for end in ends:
            piece = {"which": range(start, end), "given": given, "probabilities": probabilities}
            # A replay would write into the cache again.
            streams = run(self.updates(**piece), streams, policy=Keep()) if caching else self.run(streams, **piece)
            states.append(streams["hidden"])
            start = end

        both = self.layer_norm(torch.cat([streams["attention"], streams["hidden"]], dim=-1))
        return ReformerEncoderOutput(
            nn.functional.dropout(both, self.dropout, self.training),
            states if output_hidden_states else [],
            [taken for (taken,) in probabilities],
            given.get("past_buckets_states"),
        )

    def updates(
        self, which: Iterable[int], given: dict[str, Any], probabilities: list[list[Tensor]]
    ) -> Iterator[Update]:
        for index in which:
            layer, attention = cast(Any, self.layers[index]), self._attentions[index]
            attention.attention = layer.attention  # it may have been replaced
            keywords = given | {"probabilities": probabilities[index]} if probabilities else given
            yield Update("attention", attention, ("hidden",), kwargs=keywords)
            yield Update("hidden", layer.feed_forward, ("attention",))


class _Attention(nn.Module):
    """The attention of a layer, which remembers its hash buckets for the replay."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: Tensor, probabilities: list[Tensor] | None = None, **given: Any) -> Tensor:
        attend: Any = self.attention.self_attention
        hashed = getattr(attend, "_hash_vectors", None)  # local attention has none
        if hashed is not None:
            # Published layers are given their buckets in the backward and do not hash again. Random numbers drawn after
            # the hashing, for dropout, are then others than in the forward. `remember` moves the generators as well.
            attend._hash_vectors = lambda *args, **kwargs: remember(lambda: hashed(*args, **kwargs))
        try:
            out = self.attention(hidden_states, output_attentions=probabilities is not None, **given)
        finally:
            if hashed is not None:
                del attend._hash_vectors
        if probabilities is not None and not probabilities:  # in the forward, that is
            probabilities.append(out.attention_probs.detach())
        return out.hidden_states


def _new_cache() -> Any:
    from transformers.models.reformer.modeling_reformer import ReformerDynamicCache  # pyright: ignore[reportMissingImports]

    return ReformerDynamicCache()


class Layers(nn.Module):
    """A reversible stack in the place of a model's list of layers, which it is iterated as: one layer, the stack.

    `model.model.layers = Layers(Midpoint.from_residual(model.model.layers))`. The layers are registered under their
    numbers, so that weights keep their names. What the model gives its layers besides hidden states (masks, position
    embeddings) goes to each of them. A cache is filled as usual; where gradients are wanted too, activations are kept
    then, with a warning.

    >>> blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, norm_first=True) for _ in range(3))
    >>> layers, x = Layers(Midpoint.from_residual(blocks)), torch.randn(5, 2, 8)
    >>> for layer in layers:
    ...     x = layer(x)
    >>> [*layers.state_dict()] == [*blocks.state_dict()]
    True
    """

    def __init__(self, stack: Midpoint | Momentum) -> None:
        super().__init__()
        for index, block in enumerate(stack.blocks):
            layer = getattr(block, "module", None)
            if not isinstance(layer, nn.Module):
                raise TypeError(
                    f"block {index} is {type(block).__name__}, not what a residual layer adds; give Layers a stack "
                    "made by Midpoint.from_residual or Momentum.from_residual"
                )
            self.add_module(str(index), layer)
            block.module = _HiddenStates(layer)
        self._stack = (stack,)  # in a tuple: not registered, or the weights would have second names

    @property
    def stack(self) -> Midpoint | Momentum:
        """The reversible stack: for its policy, say."""
        (stack,) = self._stack
        for block, layer in zip(stack.blocks, self._modules.values(), strict=True):
            cast(Any, block).module.module = layer  # it may have been replaced
        return stack

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Layers]:
        yield self

    def __getitem__(self, index: int | slice) -> Any:
        layers = [*self._modules.values()]
        if not isinstance(index, slice):
            return layers[index]
        if len(layers[index]) < len(layers):
            raise ValueError(f"a reversible stack of {len(self)} layers runs whole; it cannot be cut to {index}")
        return [self]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        stack = self.stack
        if args:
            signature = inspect.signature(type(self[0]).forward)
            kwargs |= [*signature.bind_partial(self, hidden_states, *args).arguments.items()][2:]
        cache = kwargs.get("past_key_values", kwargs.get("layer_past"))
        if cache is not None and torch.is_grad_enabled():
            warnings.warn(
                "retrograd: a replay would write into the cache again, so activations are kept; to reverse, give "
                "use_cache=False or set model.config.use_cache = False",
                stacklevel=2,
            )
            out = stack.merge(run(stack.updates(**kwargs), stack.split(hidden_states), policy=Keep()))
        else:
            out = stack(hidden_states, **kwargs)
        return (out,) if cast(Any, stack.blocks[0]).module.in_tuple else out


class _HiddenStates(nn.Module):
    """What a layer makes of the hidden states; some return it in a tuple with attention probabilities."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.module = layer  # the name under which keywords are routed through a wrapper
        self.in_tuple = False

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        out = self.module(hidden_states, **kwargs)
        self.in_tuple = isinstance(out, tuple)
        return out[0] if isinstance(out, tuple) else out
