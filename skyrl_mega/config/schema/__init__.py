"""Every setting of a run, as dataclasses whose field docstrings are the manual.

`Config` is the root; each file holds the groups of one subject. A field made with `one_of`, `between` or `at_least`
carries its allowed values in its metadata, where `config/keys.py` reads them. Nothing here imports torch, ray or vllm.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from skyrl_mega.config.schema.algorithm import (
    AlgorithmConfig,
    DynamicSamplingConfig,
    GspoConfig,
    KlConfig,
    OverlongConfig,
)
from skyrl_mega.config.schema.cluster import ClusterConfig, RatesConfig, TopologyConfig
from skyrl_mega.config.schema.data import DataConfig, WarmupConfig
from skyrl_mega.config.schema.environment import EnvironmentConfig, RetrieverConfig
from skyrl_mega.config.schema.evaluation import EvaluationConfig
from skyrl_mega.config.schema.model import BuildConfig, ModelConfig
from skyrl_mega.config.schema.policy import LayoutConfig, MoeConfig, OptimizerConfig, PolicyConfig, ReferenceConfig
from skyrl_mega.config.schema.rollout import RolloutConfig, SamplingConfig
from skyrl_mega.config.schema.run import CheckpointConfig, RunConfig, TelemetryConfig
from skyrl_mega.config.schema.weights import WeightsConfig

__all__ = [
    "AlgorithmConfig",
    "BuildConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "DynamicSamplingConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "GspoConfig",
    "KlConfig",
    "LayoutConfig",
    "ModelConfig",
    "MoeConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "PolicyConfig",
    "RatesConfig",
    "ReferenceConfig",
    "RetrieverConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "TelemetryConfig",
    "TopologyConfig",
    "WarmupConfig",
    "WeightsConfig",
]


@dataclass
class Config:
    """A run."""

    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
