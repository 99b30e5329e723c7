"""The "dynmo" section of the DeepSpeed JSON, as frozen pydantic models that refuse unknown keys and loose types.

Nothing here imports torch or DeepSpeed, so a configuration can be checked before a job starts. :func:`parse_section`
parses an object into such a model; its errors name the full key path.
"""

from ds_dynmo.config.deepspeed_keys import (
    BATCH_KEYS,
    check_batch_sizes,
    check_deepspeed_keys,
    check_numbers,
    check_types_and_params,
)
from ds_dynmo.config.dynmo import DynMoConfig, ProfileConfig, RandomnessConfig, TraceConfig
from ds_dynmo.config.reading import load_json, load_settings, parse_section, read_dynmo_config
from ds_dynmo.config.repack import KubernetesConfig, RepackConfig
from ds_dynmo.config.type_partition import parse_type_partition

__all__ = [
    "BATCH_KEYS",
    "DynMoConfig",
    "KubernetesConfig",
    "ProfileConfig",
    "RandomnessConfig",
    "RepackConfig",
    "TraceConfig",
    "check_batch_sizes",
    "check_deepspeed_keys",
    "check_numbers",
    "check_types_and_params",
    "load_json",
    "load_settings",
    "parse_section",
    "parse_type_partition",
    "read_dynmo_config",
]
