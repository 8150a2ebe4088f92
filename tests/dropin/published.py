"""The four published packages, imported without a trace, and their models in sizes that a test can afford.

A model is built by `MODELS[name](**options)`, with whichever classes its package holds at that moment; `Model.step`
runs it from a seed (the same inputs, dropout masks and hash rotations) and returns what a test compares.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

if "CACHE_PATH" not in os.environ:  # se3 reads it when imported, and would otherwise write into the home directory
    os.environ["CACHE_PATH"] = tempfile.mkdtemp(prefix="se3-basis-")
    atexit.register(shutil.rmtree, os.environ["CACHE_PATH"], ignore_errors=True)

_TORCHVISION = {
    "torchvision": (),
    "torchvision.transforms": (),
    "torchvision.datasets": ("ImageFolder",),
    "torchvision.utils": ("make_grid", "save_image"),
}


@contextlib.contextmanager
def torchvision_stub() -> Iterator[None]:
    """As much of torchvision as `import nuwa_pytorch` needs; nuwa's models do not use it afterwards."""
    added = [name for name in _TORCHVISION if name not in sys.modules]
    for name in added:
        sys.modules[name] = types.ModuleType(name)
        for attribute in _TORCHVISION[name]:
            setattr(sys.modules[name], attribute, object)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # vector-quantize-pytorch uses torch.cuda.amp.autocast
            yield
    finally:
        for name in added:
            del sys.modules[name]  # left behind, it would break importlib.util.find_spec("torchvision")


with torchvision_stub():
    import axial_attention.axial_attention
    import axial_attention.reversible
    import nuwa_pytorch.nuwa_pytorch
    import nuwa_pytorch.reversible
    import nuwa_pytorch.reversible_video_audio
    import reformer_pytorch.reformer_pytorch
    import reformer_pytorch.reversible
    import se3_transformer_pytorch.reversible
    import se3_transformer_pytorch.se3_transformer_pytorch
    from axial_attention import AxialImageTransformer
    from nuwa_pytorch import NUWA, NUWAVideoAudio, VQGanVAE
    from reformer_pytorch import Reformer, ReformerEncDec, ReformerLM
    from se3_transformer_pytorch import SE3Transformer

CLASSES: dict[str, type[nn.Module]] = {
    "axial": axial_attention.reversible.ReversibleSequence,
    "reformer": reformer_pytorch.reversible.ReversibleSequence,
    "nuwa": nuwa_pytorch.reversible.ReversibleSequence,
    "se3": se3_transformer_pytorch.reversible.ReversibleSequence,
    "dual": nuwa_pytorch.reversible_video_audio.DualModalityReversibleSequence,
}
"""The published classes, by the names that the tests give them."""

HOMES: dict[str, tuple[types.ModuleType, str]] = {
    "axial": (axial_attention.axial_attention, "ReversibleSequence"),
    "reformer": (reformer_pytorch.reformer_pytorch, "ReversibleSequence"),
    "nuwa": (nuwa_pytorch.nuwa_pytorch, "ReversibleSequence"),
    "se3": (se3_transformer_pytorch.se3_transformer_pytorch, "ReversibleSequence"),
    "dual": (nuwa_pytorch.nuwa_pytorch, "DualModalityReversibleSequence"),
}
"""Where the models of a package look its class up."""


@dataclass
class Model:
    """A model and how to run it: `call` takes it and the inputs of `draw`, and returns a list of outputs."""

    module: nn.Module
    draw: Callable[[], dict[str, Tensor]]
    call: Callable[..., list[Tensor]]

    def step(self, seed: int = 1) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
        """Outputs, a loss of them, and the inputs that need a gradient."""
        torch.manual_seed(seed)
        inputs = {
            name: value.requires_grad_() if value.is_floating_point() else value for name, value in self.draw().items()
        }
        outputs = self.call(self.module, **inputs)
        loss = sum((out.square().mean() for out in outputs), torch.zeros(()))
        return outputs, loss, {name: value for name, value in inputs.items() if value.requires_grad}


def axial_image_transformer(dropout: float) -> Model:
    """It has no dropout."""
    del dropout
    module = AxialImageTransformer(dim=8, depth=2, heads=2, reversible=True, axial_pos_emb_shape=(4, 4))
    return Model(module, lambda: {"x": torch.randn(1, 8, 4, 4)}, lambda module, x: [module(x)])


def reformer(dropout: float, **options: Any) -> Model:
    settings: dict[str, Any] = {"dim": 16, "depth": 2, "heads": 2, "bucket_size": 4, "n_hashes": 2, "ff_chunks": 1}
    settings |= {"causal": True, "lsh_dropout": dropout, "ff_dropout": dropout, "post_attn_dropout": dropout}
    module = Reformer(**settings | options)
    return Model(module, lambda: {"x": torch.randn(1, 32, 16)}, lambda module, x: [module(x)])


def reformer_lm(dropout: float, **options: Any) -> Model:
    settings: dict[str, Any] = {"num_tokens": 20, "dim": 16, "depth": 2, "max_seq_len": 32, "heads": 2, "dim_head": 8}
    settings |= {"bucket_size": 4, "n_hashes": 2, "ff_chunks": 1, "causal": True}
    module = ReformerLM(**settings | {"lsh_dropout": dropout, "ff_dropout": dropout} | options)
    return Model(module, lambda: {"tokens": torch.randint(0, 20, (1, 32))}, lambda module, tokens: [module(tokens)])


def reformer_enc_dec(dropout: float) -> Model:
    """The encoder's output reaches the decoder's blocks as the keyword `keys`, and needs a gradient."""
    side: dict[str, Any] = {"num_tokens": 20, "depth": 2, "max_seq_len": 32, "heads": 2, "bucket_size": 4}
    side |= {"n_hashes": 2, "ff_chunks": 1, "lsh_dropout": dropout, "ff_dropout": dropout}
    both = {f"{where}_{key}": value for where in ("enc", "dec") for key, value in side.items()}

    def draw() -> dict[str, Tensor]:
        return {"source": torch.randint(1, 20, (1, 32)), "target": torch.randint(1, 20, (1, 33))}

    return Model(
        ReformerEncDec(dim=16, **both),
        draw,
        lambda module, source, target: [module(source, target, return_loss=True)],
    )


def _nuwa_settings(dropout: float) -> dict[str, Any]:
    vae = VQGanVAE(dim=16, num_layers=2, image_size=16, vq_codebook_size=16, vq_codebook_dim=8, use_vgg_and_gan=False)
    return {
        **{"vae": vae, "dim": 16, "text_num_tokens": 20, "text_max_seq_len": 8, "max_video_frames": 2},
        **{"text_enc_depth": 2, "text_enc_dim_head": 8, "text_enc_heads": 2, "enc_reversible": True},
        **{"dec_depth": 2, "dec_dim_head": 8, "dec_heads": 2, "dec_reversible": True},
        **{"attn_dropout": dropout, "ff_dropout": dropout},
    }


def _text() -> Tensor:
    return torch.cat((torch.randint(1, 20, (1, 6)), torch.zeros(1, 2, dtype=torch.long)), dim=1)  # 0: padding, masked


def nuwa(dropout: float, text_dropout: float = 0.0) -> Model:
    """The video is given as codebook indices, so the VAE is there but does not run."""
    return Model(
        NUWA(**_nuwa_settings(dropout)),
        lambda: {"text": _text(), "video": torch.randint(0, 16, (1, 2, 4, 4))},
        lambda module, **inputs: [module(**inputs, return_loss=True, cond_dropout_prob=text_dropout)],
    )


def nuwa_video_audio(dropout: float, text_dropout: float = 0.0) -> Model:
    """All three block types, twice each."""
    settings = _nuwa_settings(dropout) | {
        **{"image_size": 16, "num_audio_tokens": 16, "num_audio_tokens_per_video_frame": 4},
        **{"cross_modality_attn_every": 1, "sparse_2dna_kernel_size": 3},
        **{"sparse_3dna_rel_pos_bias": False, "sparse_2dna_rel_pos_bias": False},
    }

    def draw() -> dict[str, Tensor]:
        video, audio = torch.randint(0, 16, (1, 2, 4, 4)), torch.randint(0, 16, (1, 8))
        return {"text": _text(), "video": video, "audio": audio}

    return Model(
        NUWAVideoAudio(**settings),
        draw,
        lambda module, **inputs: [module(**inputs, return_loss=True, cond_dropout_prob=text_dropout)],
    )


def se3_transformer(dropout: float, **options: Any) -> Model:
    """It has no dropout."""
    del dropout
    settings: dict[str, Any] = {"dim": 8, "heads": 2, "dim_head": 4, "depth": 2, "num_degrees": 2, "output_degrees": 2}
    settings |= {"num_neighbors": 3, "reversible": True, "num_edge_tokens": 4, "edge_dim": 4}

    def draw() -> dict[str, Tensor]:
        return {
            **{"feats": torch.randn(1, 6, 8), "coors": torch.randn(1, 6, 3), "edges": torch.randint(0, 4, (1, 6, 6))},
            "mask": torch.ones(1, 6, dtype=torch.bool),
        }

    def call(module: nn.Module, feats: Tensor, coors: Tensor, **others: Tensor) -> list[Tensor]:
        return list(module(feats, coors, **others).values())

    return Model(SE3Transformer(**settings | options), draw, call)


MODELS: dict[str, Callable[..., Model]] = {
    "AxialImageTransformer": axial_image_transformer,
    "Reformer": reformer,
    "ReformerLM": reformer_lm,
    "ReformerEncDec": reformer_enc_dec,
    "NUWA": nuwa,
    "NUWAVideoAudio": nuwa_video_audio,
    "SE3Transformer": se3_transformer,
}
