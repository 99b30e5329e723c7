"""Costs of the layers of the paper's six dynamic models, by its load formulas, for simulation and benchmark.

They depend on no engine, balancer or process, and are deterministic by seed.
"""

from simulation.loads.cases import CASES, Case
from simulation.loads.phases import Phase, mean_over
from simulation.loads.recorded import Recorded, recorded_phases

__all__ = ["CASES", "Case", "Phase", "Recorded", "mean_over", "recorded_phases"]
