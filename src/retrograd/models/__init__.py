"""Small complete models, one readable file each, on the public names of retrograd alone.

`retrograd.models.se3` needs the extra `se3` and is imported by its own name.
"""

from .axial import AxialAttention, AxialClassifier, AxialPixels
from .lm import LanguageModel
from .reformer import ExactAttention, LSHAttention, Reformer
from .video_audio import VideoAudio

__all__ = [
    "AxialAttention",
    "AxialClassifier",
    "AxialPixels",
    "ExactAttention",
    "LSHAttention",
    "LanguageModel",
    "Reformer",
    "VideoAudio",
]
