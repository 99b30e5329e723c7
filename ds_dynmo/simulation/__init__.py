"""Simulate runs of dynamic models without processes: what layers cost, and what balancers gain (:mod:`.runs`).

Costs are those of the paper's six models, by its load formulas, or recorded in real training. They depend on no engine,
balancer or process, and are deterministic by seed.
"""

from ds_dynmo.simulation.cases import CASES, LoadModel
from ds_dynmo.simulation.phases import Phase, mean_over
from ds_dynmo.simulation.recorded import CASE_HELP, RECORDED_HELP, Recorded, chosen_cases

__all__ = ["CASES", "CASE_HELP", "RECORDED_HELP", "LoadModel", "Phase", "Recorded", "chosen_cases", "mean_over"]
