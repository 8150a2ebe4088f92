"""retrograd: reversible networks for PyTorch. Any depth in the activation memory of one layer, with right gradients."""

from .engine import invert, run
from .joins import Add, Affine, Join, Scale
from .policies import Keep, Policy, Reverse
from .replay import Phase, phase, remember
from .reversible import Reversible
from .sequences import DualModality, Midpoint, Momentum, ReversibleSequence
from .update import Update

__version__ = "0.1.0.dev0"

__all__ = [
    "Add",
    "Affine",
    "DualModality",
    "Join",
    "Keep",
    "Midpoint",
    "Momentum",
    "Phase",
    "Policy",
    "Reverse",
    "Reversible",
    "ReversibleSequence",
    "Scale",
    "Update",
    "invert",
    "phase",
    "remember",
    "run",
]
