"""retrograd: reversible networks for PyTorch. Any depth in the activation memory of one layer, with right gradients."""

from .alarms import DriftWarning, last_drift
from .auto import Auto
from .engine import invert, run
from .joins import Add, Affine, ExactAdd, Join, Scale
from .policies import Keep, Offload, Policy, Reverse
from .replay import Phase, phase, remember
from .reversible import Reversible
from .sequences import DualModality, Midpoint, Momentum, ReversibleSequence
from .update import Update

__version__ = "0.1.0.dev0"

__all__ = [
    "Add",
    "Affine",
    "Auto",
    "DriftWarning",
    "DualModality",
    "ExactAdd",
    "Join",
    "Keep",
    "Midpoint",
    "Momentum",
    "Offload",
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
