"""Video and audio towers: gradients against a plain loop, what reaches what, and what a step holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from retrograd.measure import LiveBytes
from retrograd.models.video_audio import VideoAudio

FRAMES, WINDOW, WORDS = 5, 6, 3


def model(depth: int = 4, **options: Any) -> VideoAudio:
    torch.manual_seed(0)
    options = {"vocabulary": 7} | options
    return VideoAudio(depth, 16, 8, picture=(4, 6, 3), patch=2, window=WINDOW, heads=2, **options).double()


def clip(frames: int = FRAMES) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    video, audio = (
        torch.randn(shape, generator=generator, dtype=torch.double).requires_grad_()
        for shape in ((2, frames, 4, 6, 3), (2, frames * WINDOW))
    )
    return video, audio, torch.randint(7, (2, WORDS), generator=generator)


def plain_blocks(net: VideoAudio) -> Any:
    """The blocks in a loop that keeps its activations."""

    def run(video: Tensor, audio: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        x1 = x2 = video
        m1 = m2 = audio
        for kind, (f, g, j, k) in zip(net.blocks.kinds, net.blocks.networks(), strict=True):
            x1 = x1 + {"self": lambda: f(x2), "context": lambda: f(x2, context), "other": lambda: f(x2, m2)}[kind]()  # noqa: B023
            x2 = x2 + g(x1)
            m1 = m1 + {"self": lambda: j(m2), "context": lambda: j(m2, context), "other": lambda: j(m2, x2)}[kind]()  # noqa: B023
            m2 = m2 + k(m1)
        return (x1 + x2) / 2, (m1 + m2) / 2

    return run


def test_gradients_are_those_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    net, (video, audio, text) = model(), clip()
    wanted = [video, audio, *net.parameters()]

    def gradients() -> list[Tensor]:
        frames, sound = net.loss(video, audio, text)
        return [frames.detach(), sound.detach(), *torch.autograd.grad(frames + 2 * sound, wanted)]

    found = gradients()
    monkeypatch.setattr(net.blocks, "forward", plain_blocks(net))
    torch.testing.assert_close(found, gradients(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("hears", [True, False])
def test_each_modality_hears_the_other(hears: bool) -> None:
    net, (video, audio, text) = model(kinds=["self", "context", "other" if hears else "self"]), clip()
    frames, sound = net(video, audio, text)
    from_video, from_audio = (
        torch.autograd.grad(output.square().sum(), source, retain_graph=True, allow_unused=True)[0]
        for output, source in ((sound, video), (frames, audio))
    )
    assert (from_video is not None and bool(from_video.any())) == hears
    assert (from_audio is not None and bool(from_audio.any())) == hears


def test_reads_the_text() -> None:
    net, (video, audio, text) = model(), clip()
    for one, other in zip(net(video, audio, text), net(video, audio, (text + 1) % 7), strict=True):
        assert not torch.allclose(one, other)


@pytest.mark.parametrize("frame", range(FRAMES))
def test_nothing_comes_from_later_frames(frame: int) -> None:
    """The picture of a frame is known when its sound is predicted; its own sound and all that follows are not."""
    net, (video, audio, text) = model(depth=6), clip()
    frames, sound = net(video, audio, text)
    for output in (frames[:, frame], sound.unflatten(1, (-1, WINDOW))[:, frame]):
        of_video, of_audio = torch.autograd.grad(output.square().sum(), (video, audio), retain_graph=True)
        of_audio = of_audio.unflatten(1, (-1, WINDOW))
        assert not of_video[:, frame + 1 :].any()
        assert not of_audio[:, frame:].any()
        assert of_video[:, : frame + 1].any((0, 2, 3, 4)).all()
        assert of_audio[:, :frame].any((0, 2)).all()


def test_patches_and_back() -> None:
    net, video = model(), clip()[0]
    patches = net.patches(video)
    assert patches.shape == (2, FRAMES, 6, 12)
    torch.testing.assert_close(patches[0, 1, 4].view(2, 2, 3), video[0, 1, 2:4, 2:4])
    torch.testing.assert_close(net.pictures(patches), video)


def test_any_number_of_frames() -> None:
    net, (video, audio, text) = model(), clip(9)
    short = net(video[:, :4], audio[:, : 4 * WINDOW], text)
    torch.testing.assert_close(net(video, audio, text)[1][:, : 4 * WINDOW], short[1])


def test_memory_does_not_grow_with_depth() -> None:
    def peak(depth: int) -> int:
        net = model(depth)
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        video, audio, text = clip()
        with LiveBytes() as memory:
            sum(net.loss(video.detach(), audio.detach(), text)).backward()
        return memory.peak

    assert peak(12) == peak(6)  # not 3: with one block that reads the text, its gradient is never added to another


def test_without_text() -> None:
    net, (video, audio, text) = model(vocabulary=None), clip()
    assert net.blocks.kinds == ["self", "other", "self", "other"]
    sum(net.loss(video, audio)).backward()
    with pytest.raises(ValueError, match="this model reads none; build it with a vocabulary"):
        net(video, audio, text)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"video": None}, r"video must be \(batch, frames, 4, 6, 3\), not missing"),
        ({"video": torch.zeros(2, FRAMES, 4, 4, 3)}, r"video must be .* not \(2, 5, 4, 4, 3\)"),
        ({"audio": None}, r"audio for 5 frames must be \(2, 30\), 6 samples for each frame, not missing"),
        ({"audio": torch.zeros(2, 29)}, r"must be \(2, 30\), 6 samples for each frame, not \(2, 29\)"),
        ({"text": None}, r"text must be \(2, 1 to 32 words\), not missing"),
        ({"text": torch.zeros(2, 33).long()}, r"1 to 32 words\), not \(2, 33\)"),
    ],
)
def test_wrong_clips(changed: dict[str, Tensor | None], message: str) -> None:
    video, audio, text = clip()
    with pytest.raises(ValueError, match=message):
        model()(**({"video": video, "audio": audio, "text": text} | changed))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"picture": (4, 6)}, r"must be \(height, width, channels\), not \(4, 6\)"),
        ({"window": 0}, "window must be a positive whole number, not 0"),
        ({"patch": 5}, "patches of 5 x 5 do not fill pictures of 4 x 6"),
        ({"heads": 3}, "16 and 8, must be multiples of the number of heads, 3"),
        ({"kinds": ["self", "other"]}, "both or neither"),
        ({"vocabulary": None, "kinds": ["context"]}, "both or neither"),
        ({"kinds": ["context", "cross"]}, r"some of 'self', 'context' and 'other', not \('context', 'cross'\)"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    given = {"picture": (4, 6, 3), "patch": 2, "window": WINDOW, "heads": 2, "vocabulary": 7} | options
    with pytest.raises(ValueError, match=message):
        VideoAudio(2, 16, 8, **given)


def test_wrong_words() -> None:
    video, audio, text = clip()
    with pytest.raises(TypeError, match=r"ids of words in int64 or int32, not torch.float32"):
        model()(video, audio, text.float())
    with pytest.raises(ValueError, match=r"words must lie between 0 and .* not between 999 and 999"):
        model()(video, audio, torch.full_like(text, 999))


def test_the_picture_may_be_a_list() -> None:
    made = VideoAudio(2, 16, 8, picture=[4, 6, 3], patch=2, window=WINDOW, heads=2)
    assert made(torch.zeros(1, 2, 4, 6, 3), torch.zeros(1, 2 * WINDOW))[0].shape == (1, 2, 4, 6, 3)
