"""Values that pass between measuring, deciding and migrating. All are frozen and check themselves once."""

from ds_dynmo.placement import check_partition, stage_of
from ds_dynmo.plan.migration import LayerMove, MigrationPlan
from ds_dynmo.plan.profile import HeldBytes, LayerCost, Profile, limit_minus_workspace
from ds_dynmo.plan.reports import MeasuredReport, RebalanceReport, RepackReport, SaveReport, reports_after

__all__ = [
    "HeldBytes",
    "LayerCost",
    "LayerMove",
    "MeasuredReport",
    "MigrationPlan",
    "Profile",
    "RebalanceReport",
    "RepackReport",
    "SaveReport",
    "check_partition",
    "limit_minus_workspace",
    "reports_after",
    "stage_of",
]
