"""Reports of decisions and of measurements after them."""

from __future__ import annotations

from ds_dynmo import partitioners
from ds_dynmo.engine.decide.cycle import Reason, Request
from ds_dynmo.engine.decide.decision import Decision
from ds_dynmo.plan import MeasuredReport, MigrationPlan, Profile, RebalanceReport


def measured_report(profile: Profile, rebalance_step: int | None) -> MeasuredReport:
    """Build the report of a profile under its placement.

    Args:
        rebalance_step: step of the move to this placement; None: the first placement.
    """
    loads = partitioners.loads_of(profile.costs("time"), profile.placement)
    return MeasuredReport(
        step=profile.step,
        rebalance_step=rebalance_step,
        placement=profile.placement,
        bottleneck_seconds=max(loads),
        imbalance=partitioners.imbalance_of_loads(loads),
        batch_seconds=profile.batch_seconds,
        bubble_ratio=profile.bubble_ratio,
    )


def rebalance_report(
    plan: MigrationPlan,
    decision: Decision | None,
    *,
    step: int,
    request: Request,
    bytes_moved: int,
    seconds: tuple[float, float, float],
    background_seconds: float | None = None,
    load_signals: tuple[float | None, ...],
) -> RebalanceReport:
    """Build the report of a decision that was carried out.

    Args:
        decision: None: there was no profile for predictions.
        seconds: of profile, decision and migration, as in a :class:`RebalanceReport`.
        background_seconds: from the beginning to the end of a move while a batch trained; None: training waited for it.
    """
    found = decision.found if decision else None
    return RebalanceReport(
        step=step,
        reason=str(request),
        old_placement=plan.old,
        new_placement=plan.new,
        bottleneck_seconds_before=decision.bottleneck_seconds_before if decision else None,
        bottleneck_seconds_after=decision.bottleneck_seconds_after if decision else None,
        imbalance_before=decision.imbalance_before if decision else None,
        imbalance_after=decision.imbalance_after if decision else None,
        stage_seconds_before=decision.stage_seconds_before if decision else None,
        stage_seconds_after=decision.stage_seconds_after if decision else None,
        iteration_seconds_before=decision.iteration_seconds_before if decision else None,
        iteration_seconds_after=decision.iteration_seconds_after if decision else None,
        verdict=decision.verdict if decision else "",
        bubble_ratio_before=decision.bubble_ratio_before if decision else None,
        bubble_ratio_after=decision.bubble_ratio_after if decision else None,
        schedule_splits=found.schedule.splits if found else None,
        lower_bound_seconds=found.lower_bound_seconds if found else None,
        layers_moved=len(plan.moves),
        bytes_moved=bytes_moved,
        profile_seconds=seconds[0],
        decide_seconds=seconds[1],
        migrate_seconds=seconds[2],
        background_seconds=background_seconds,
        load_signals=load_signals,
        model_changed=request.reason is Reason.MODEL_CHANGED,
    )
