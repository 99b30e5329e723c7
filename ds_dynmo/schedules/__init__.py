"""Pipeline schedules as data: which stage runs which pass of which micro-batch, in which order.

Pure functions of numbers that need only the standard library and numpy. Each concept has one module:

=========================  ===========================================================================================
concept                    module
=========================  ===========================================================================================
a schedule                 ``actions``; ``schedule`` refuses an order that cannot run
its costs                  ``costs``: seconds and bytes
its simulation             ``order`` simulates, ``replay`` returns the timeline; ``fast_1f1b``: many 1F1Bs at once
its memory                 ``memory``; micro-batches in flight under 1F1B: ``one_f_one_b``
fixed orders               ``one_f_one_b``: 1F1B on a chain, interleaved on a loop
orders for given costs     ``search`` chooses among fixed ones and those of ``greedy``, with and without ``fusing``
batches without a pause    ``back_to_back``
lower bounds               ``bound``
messages between stages    ``link_order``; ``first_batch`` announces their sizes
=========================  ===========================================================================================
"""

from ds_dynmo.schedules.actions import Action, Kind
from ds_dynmo.schedules.back_to_back import period_seconds, shortest_period
from ds_dynmo.schedules.bound import lower_bound, lower_bounds
from ds_dynmo.schedules.costs import PassBytes, PassCosts
from ds_dynmo.schedules.fast_1f1b import iteration_seconds, simulate
from ds_dynmo.schedules.first_batch import first_batch
from ds_dynmo.schedules.link_order import Message, link_orders
from ds_dynmo.schedules.memory import peak_bytes
from ds_dynmo.schedules.one_f_one_b import in_flight, interleaved_1f1b, one_f_one_b
from ds_dynmo.schedules.replay import ScheduleTimeline, idle_share, replay
from ds_dynmo.schedules.schedule import Schedule
from ds_dynmo.schedules.search import FoundSchedule, best_schedule, one_f_one_b_limit, schedule_for_equal_costs

__all__ = [
    "Action",
    "FoundSchedule",
    "Kind",
    "Message",
    "PassBytes",
    "PassCosts",
    "Schedule",
    "ScheduleTimeline",
    "best_schedule",
    "first_batch",
    "idle_share",
    "in_flight",
    "interleaved_1f1b",
    "iteration_seconds",
    "link_orders",
    "lower_bound",
    "lower_bounds",
    "one_f_one_b",
    "one_f_one_b_limit",
    "peak_bytes",
    "period_seconds",
    "replay",
    "schedule_for_equal_costs",
    "shortest_period",
    "simulate",
]
