"""Simulate runs of dynamic models without processes: what layers cost, and what balancers gain (:mod:`.runs`).

Costs are those of the paper's six models, by its load formulas, or recorded in real training. They depend on no engine,
balancer or process, and are deterministic by seed.
"""

from simulation.load_models import LOAD_MODELS, LoadModel
from simulation.phases import Phase, mean_over
from simulation.recorded import CASE_HELP, RECORDED_HELP, UNDIVIDED_HELP, Recorded, chosen_load_models

__all__ = [
    "CASE_HELP",
    "LOAD_MODELS",
    "RECORDED_HELP",
    "UNDIVIDED_HELP",
    "LoadModel",
    "Phase",
    "Recorded",
    "chosen_load_models",
    "mean_over",
]
