"""Costs of the layers of the paper's six dynamic models, by its load formulas, or as recorded in real training.

They depend on no engine, balancer or process, and are deterministic by seed.
"""

from ds_dynmo.cli.simulation.loads.cases import CASES, Case
from ds_dynmo.cli.simulation.loads.phases import Phase, mean_over
from ds_dynmo.cli.simulation.loads.recorded import CASE_HELP, RECORDED_HELP, Recorded, chosen_cases

__all__ = ["CASES", "CASE_HELP", "RECORDED_HELP", "Case", "Phase", "Recorded", "chosen_cases", "mean_over"]
