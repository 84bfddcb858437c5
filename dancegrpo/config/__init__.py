"""The typed config: ``load_config(path, overrides)`` gives a checked, frozen ``Config``."""

from dancegrpo.config.counts import Counts, check_counts, counts_table, derive_counts
from dancegrpo.config.errors import ConfigError, ReportedError, choices_text
from dancegrpo.config.load import (
    DEFAULT_CONFIG,
    dump_yaml,
    find_config,
    load_config,
    load_sections,
    shipped_configs,
)
from dancegrpo.config.schema import (
    Config,
    DataConfig,
    EvaluationConfig,
    LoraConfig,
    ModelConfig,
    OutputConfig,
    ParallelConfig,
    PrecisionConfig,
    RewardConfig,
    RewardTerm,
    SamplerConfig,
    TrainConfig,
)

__all__ = [
    "Config",
    "ConfigError",
    "Counts",
    "DEFAULT_CONFIG",
    "DataConfig",
    "EvaluationConfig",
    "LoraConfig",
    "ModelConfig",
    "OutputConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ReportedError",
    "RewardConfig",
    "RewardTerm",
    "SamplerConfig",
    "TrainConfig",
    "check_counts",
    "choices_text",
    "counts_table",
    "derive_counts",
    "dump_yaml",
    "find_config",
    "load_config",
    "load_sections",
    "shipped_configs",
]
