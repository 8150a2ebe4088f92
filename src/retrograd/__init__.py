"""retrograd: reversible networks for PyTorch. Any depth in the activation memory of one layer, with right gradients."""

from .alarms import DriftWarning, last_drift
from .engine import invert, run
from .joins import Add, Affine, ExactAdd, Join, Scale
from .policies import Keep, Policy, Reverse
from .replay import Phase, phase, remember
from .reversible import Reversible
from .sequences import DualModality, Midpoint, Momentum, ReversibleSequence
from .update import Update

__version__ = "0.1.0.dev0"

__all__ = [
    "Add",
    "Affine",
    "DriftWarning",
    "DualModality",
    "ExactAdd",
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
    "last_drift",
    "phase",
    "remember",
    "run",
]
