"""Small complete models, one readable file each, on the public names of retrograd alone.

`retrograd.models.se3` needs the extra `se3` and is imported by its own name.
"""

from .axial import AxialAttention, AxialClassifier, AxialPixels
from .lm import LanguageModel

__all__ = ["AxialAttention", "AxialClassifier", "AxialPixels", "LanguageModel"]
