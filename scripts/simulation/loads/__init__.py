"""Costs of the layers of the paper's six dynamic models, by its load formulas, or as recorded in real training.

They depend on no engine, balancer or process, and are deterministic by seed.
"""

from simulation.loads.cases import CASES, Case
from simulation.loads.phases import Phase, mean_over
from simulation.loads.recorded import CASE_HELP, RECORDED_HELP, Recorded, chosen_cases

__all__ = ["CASES", "CASE_HELP", "RECORDED_HELP", "Case", "Phase", "Recorded", "chosen_cases", "mean_over"]
