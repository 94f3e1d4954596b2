"""Schema of a run's configuration: dataclasses with the manual in their field docstrings.

`Config` is the root; each file holds the groups of a subject. `one_of`, `between` and `at_least` store the allowed
values of a field in its metadata, for `config/keys.py`. Groups that few files use are imported from their own file
(`schema.losses.GspoConfig`). Nothing here imports torch, ray or vllm.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from skyrl_mega.config.schema.algorithm import AlgorithmConfig, KlConfig
from skyrl_mega.config.schema.asynchrony import AsynchronyConfig
from skyrl_mega.config.schema.cluster import ClusterConfig
from skyrl_mega.config.schema.corrections import RejectionConfig
from skyrl_mega.config.schema.critic import CriticConfig
from skyrl_mega.config.schema.data import DataConfig, WarmupConfig
from skyrl_mega.config.schema.environment import EnvironmentConfig, RetrieverConfig
from skyrl_mega.config.schema.evaluation import EvaluationConfig
from skyrl_mega.config.schema.health import HealthConfig
from skyrl_mega.config.schema.model import BuildConfig, ModelConfig
from skyrl_mega.config.schema.policy import LayoutConfig, MoeConfig, OptimizerConfig, PolicyConfig, ReferenceConfig
from skyrl_mega.config.schema.precision import PrecisionConfig
from skyrl_mega.config.schema.residency import ResidencyConfig
from skyrl_mega.config.schema.rollout import RolloutConfig, SamplingConfig
from skyrl_mega.config.schema.run import CheckpointConfig, RunConfig, TelemetryConfig
from skyrl_mega.config.schema.samples import DynamicSamplingConfig, OverlongConfig
from skyrl_mega.config.schema.weights import WeightsConfig

__all__ = [
    "AlgorithmConfig",
    "AsynchronyConfig",
    "BuildConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "DynamicSamplingConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "KlConfig",
    "LayoutConfig",
    "ModelConfig",
    "MoeConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "PolicyConfig",
    "PrecisionConfig",
    "ReferenceConfig",
    "RejectionConfig",
    "RetrieverConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "TelemetryConfig",
    "WeightsConfig",
]


@dataclass
class Config:
    """All settings of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    residency: ResidencyConfig = field(default_factory=ResidencyConfig)
    asynchrony: AsynchronyConfig = field(default_factory=AsynchronyConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
