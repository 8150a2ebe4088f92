"""retrograd: reversible networks for PyTorch. Any depth in the activation memory of one layer, with right gradients."""

from .alarms import DriftWarning, last_drift
from .auto import Auto
from .check import check
from .engine import invert, run
from .frames import Phase, phase, remember
from .graphed import Graphed, graphed
from .joins import Add, Affine, ExactAdd, Join, Scale
from .measure import Measurement, measure
from .plan import Plan, plan
from .policies import Keep, Offload, Policy, Reverse
from .report import Problem, Report
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
    "Graphed",
    "Join",
    "Keep",
    "Measurement",
    "Midpoint",
    "Momentum",
    "Offload",
    "Phase",
    "Plan",
    "Policy",
    "Problem",
    "Report",
    "Reverse",
    "Reversible",
    "ReversibleSequence",
    "Scale",
    "Update",
    "check",
    "graphed",
    "invert",
    "last_drift",
    "measure",
    "phase",
    "plan",
    "remember",
    "run",
]
