"""Video and audio towers that attend to themselves, to a text, and to each other: a `DualModality` of any depth.

Frames are cut into patches (ViT: Dosovitskiy et al., 2021), the sound into one window of samples for each frame. Blocks
of three kinds take turns, each with a feed-forward in both towers. Attention never looks into later frames, and the
longer ago an earlier one is, the less: by a slope of each head (ALiBi: Press et al., 2022), so that clips may have any
number of frames. The heads predict the next frame, and the sound of this frame from the sounds before it.

Shapes: B batch, F frames, P patches of a frame, C width of a tower, W samples of a window, L words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

import retrograd as rg

Kind = Literal["self", "context", "other"]


class VideoAudio(nn.Module):
    """Predicts the next frame of a video and the sound of each frame, with `depth` blocks in each of two towers.

    `picture` is (height, width, channels) of a frame and `patch` the side of its patches; `window` is the number of
    samples for each frame. With a `vocabulary`, each clip has a text of at most `text_length` words. `kinds` are those
    of the blocks, in turn: "self", "context" (the text) and "other" (the other tower); all of them unless told, and
    without a text all but "context". `policy` and `join` are those of the blocks.

    >>> model = VideoAudio(3, 32, 16, picture=(8, 8, 3), patch=4, window=20, heads=2, vocabulary=10)
    >>> video, audio, text = torch.rand(2, 5, 8, 8, 3), torch.randn(2, 5 * 20), torch.randint(10, (2, 4))
    >>> frames, sound = model(video, audio, text)
    >>> frames.shape, sound.shape
    (torch.Size([2, 5, 8, 8, 3]), torch.Size([2, 100]))
    >>> sum(model.loss(video, audio, text)).backward()
    """

    def __init__(
        self,
        depth: int,
        video_width: int,
        audio_width: int,
        *,
        picture: tuple[int, int, int],
        patch: int,
        window: int,
        heads: int = 4,
        vocabulary: int | None = None,
        text_length: int = 32,
        kinds: Sequence[Kind] | None = None,
        policy: rg.Policy = rg.Reverse(),
        join: rg.Join = rg.Add(),
    ) -> None:
        super().__init__()
        every: list[Kind] = ["self", "context", "other"]
        if kinds is None:
            kinds = [kind for kind in every if kind != "context" or vocabulary is not None]
        if not kinds or not set(kinds) <= set(every):
            raise ValueError(f"VideoAudio: kinds must be some of 'self', 'context' and 'other', not {tuple(kinds)}")
        if not isinstance(picture, Sequence) or len(picture) != 3:
            raise ValueError(f"VideoAudio: picture must be (height, width, channels), not {picture!r}")
        height, width, channels = picture
        sizes = {"depth": depth, "video_width": video_width, "audio_width": audio_width, "heads": heads}
        sizes |= {"height": height, "width": width, "channels": channels, "patch": patch, "window": window}
        sizes |= {"vocabulary": 1 if vocabulary is None else vocabulary, "text_length": text_length}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"VideoAudio: {name} must be a positive whole number, not {size!r}")
        if height % patch or width % patch:
            raise ValueError(f"VideoAudio: patches of {patch} x {patch} do not fill pictures of {height} x {width}")
        if video_width % heads or audio_width % heads:
            raise ValueError(
                f"VideoAudio: the widths of the towers, {video_width} and {audio_width}, must be multiples of the "
                f"number of heads, {heads}"
            )
        if ("context" in kinds) != (vocabulary is not None):
            raise ValueError(
                f"VideoAudio: blocks of kind 'context' read a text, so there must be both or neither; kinds are "
                f"{tuple(kinds)} and vocabulary is {vocabulary}"
            )
        self.picture, self.patch, self.window = (height, width, channels), patch, window
        self.vocabulary, self.text_length = vocabulary, text_length
        patches = (height // patch) * (width // patch)
        if vocabulary is not None:
            self.embed = nn.Embedding(vocabulary, video_width)
            self.place = nn.Parameter(0.02 * torch.randn(text_length, video_width))
        self.video_in = nn.Linear(patch * patch * channels, video_width)
        self.audio_in = nn.Linear(window, audio_width)
        self.where = nn.Parameter(0.2 * torch.randn(patches, video_width))

        def block(kind: Kind) -> tuple[nn.Module, ...]:
            video, audio = (video_width, patches), (audio_width, 1)  # the width of a token, and tokens in a frame
            read = {"self": (video, audio), "context": ((video_width, 0),) * 2, "other": (audio, video)}[kind]
            return (
                Attention(heads, *video, *read[0]),
                FeedForward(video_width),
                Attention(heads, *audio, *read[1]),
                FeedForward(audio_width),
            )

        in_turn: list[Kind] = [kinds[index % len(kinds)] for index in range(depth)]
        self.blocks = rg.DualModality([block(kind) for kind in in_turn], in_turn, policy=policy, join=join)
        self.video_norm, self.audio_norm = nn.LayerNorm(video_width), nn.LayerNorm(audio_width)
        self.video_out = nn.Linear(video_width, patch * patch * channels)
        self.audio_out = nn.Linear(audio_width, window)

    def forward(self, video: Tensor, audio: Tensor, text: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """For each frame the next one, (B, F, height, width, channels), and its sound, (B, F * W).

        Both are predicted from the frames up to this one and from the sounds before it.
        """
        self.refuse(video, audio, text)
        seen = self.video_in(self.patches(video)) + self.where  # (B, F, P, C)
        windows = audio.unflatten(1, (-1, self.window))  # (B, F, W)
        heard = self.audio_in(functional.pad(windows, (0, 0, 1, 0))[:, :-1])  # the sound before each frame: (B, F, C)
        context = {} if text is None else {"context": self.read(text)}
        seen, heard = self.blocks(seen.flatten(1, 2), heard, **context)  # (B, F * P, C), (B, F, C)
        frames = self.video_out(self.video_norm(seen)).unflatten(1, (video.shape[1], -1))  # (B, F, P, patch)
        return self.pictures(frames), self.audio_out(self.audio_norm(heard)).flatten(1)

    def read(self, text: Tensor) -> Tensor:
        """The words and their places: (B, L) -> (B, L, C)."""
        try:
            return self.embed(text) + self.place[: text.shape[1]]
        except IndexError:  # on CUDA it is the kernel that asserts: looking at values would wait for the device
            raise ValueError(
                f"VideoAudio: words must lie between 0 and {self.vocabulary - 1}, the vocabulary, not between "  # type: ignore[operator]
                f"{text.min()} and {text.max()}"
            ) from None

    def loss(self, video: Tensor, audio: Tensor, text: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The mean squared errors of the frames, from the second one on, and of the sound."""
        frames, sound = self(video, audio, text)
        if video.shape[1] < 2:
            raise ValueError("VideoAudio: a clip of one frame has no next one to predict; give two frames or more")
        return functional.mse_loss(frames[:, :-1], video[:, 1:]), functional.mse_loss(sound, audio)

    def patches(self, video: Tensor) -> Tensor:
        """(B, F, height, width, channels) -> (B, F, P, patch * patch * channels)."""
        cut = video.unflatten(3, (-1, self.patch)).unflatten(
            2, (-1, self.patch)
        )  # (B, F, h, patch, w, patch, channels)
        return cut.transpose(3, 4).flatten(4).flatten(2, 3)

    def pictures(self, patches: Tensor) -> Tensor:
        """The inverse of `patches`."""
        height, width, channels = self.picture
        cut = patches.unflatten(3, (self.patch, self.patch, channels))
        cut = cut.unflatten(2, (height // self.patch, width // self.patch)).transpose(3, 4)
        return cut.flatten(4, 5).flatten(2, 3)

    def refuse(self, video: Tensor | None, audio: Tensor | None, text: Tensor | None) -> None:
        """An error for a clip that the model cannot read."""
        height, width, channels = self.picture
        if video is None or video.dim() != 5 or tuple(video.shape[2:]) != self.picture or not video.shape[1]:
            raise ValueError(
                f"VideoAudio: video must be (batch, frames, {height}, {width}, {channels}), not {_shape(video)}"
            )
        expected = video.shape[0], video.shape[1] * self.window
        if audio is None or tuple(audio.shape) != expected:
            raise ValueError(
                f"VideoAudio: audio for {video.shape[1]} frames must be {expected}, {self.window} samples for each "
                f"frame, not {_shape(audio)}"
            )
        if self.vocabulary is None and text is not None:
            raise ValueError("VideoAudio: a text, but this model reads none; build it with a vocabulary")
        if self.vocabulary is not None and (
            text is None or text.dim() != 2 or len(text) != len(video) or not 0 < text.shape[1] <= self.text_length
        ):
            raise ValueError(
                f"VideoAudio: text must be ({len(video)}, 1 to {self.text_length} words), not {_shape(text)}; a model "
                "without text has no vocabulary"
            )
        if text is not None and text.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"VideoAudio: text is ids of words in int64 or int32, not {text.dtype}; use text.long()")


class Attention(nn.Module):
    """Attention of a tower to itself or to a context, up to the frame of each token.

    `width` channels in each of `in_frame` tokens of a frame attend to `read_width` channels in each of `read_in_frame`
    tokens of a frame, or, where that is 0, to a context without time.
    """

    def __init__(self, heads: int, width: int, in_frame: int, read_width: int, read_in_frame: int) -> None:
        super().__init__()
        self.heads, self.in_frame, self.read_in_frame = heads, in_frame, read_in_frame
        self.norm, self.read_norm = nn.LayerNorm(width), nn.LayerNorm(read_width)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(read_width, 2 * width, bias=False)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:  # (B, tokens, C), (B, tokens read, C read)
        read = self.read_norm(x if context is None else context)
        q = self.query(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.key_value(read).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, tokens, D)
        bias = self.bias(x.shape[1], read.shape[1], q)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def bias(self, tokens: int, read: int, like: Tensor) -> Tensor | None:
        """By how much each head lowers the score of tokens in earlier frames: (H, tokens, tokens read)."""
        if self.read_in_frame == 0:
            return None
        frame = torch.arange(tokens, device=like.device) // self.in_frame
        read_frame = torch.arange(read, device=like.device) // self.read_in_frame
        ago = frame[:, None] - read_frame  # in frames
        slopes = 4.0 ** (1 - torch.arange(self.heads, device=like.device))  # from this frame only to almost all alike
        return (-slopes[:, None, None] * ago).masked_fill(ago < 0, -math.inf).to(like.dtype)


class FeedForward(nn.Sequential):
    """The second network of a tower's block."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else str(tuple(tensor.shape))
