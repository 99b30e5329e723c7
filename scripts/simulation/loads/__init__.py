"""What the layers of the paper's six dynamic models cost, from its load formulas; for simulation and benchmark.

Nothing here knows of engines, balancers or processes. All is deterministic by seed.
"""

from simulation.loads.cases import CASES, Case
from simulation.loads.phases import Phase, mean_over
from simulation.loads.recorded import Recorded, recorded_phases

__all__ = ["CASES", "Case", "Phase", "Recorded", "mean_over", "recorded_phases"]
