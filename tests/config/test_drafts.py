"""Settings of draft tokens: refusals, and vLLM's arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from skyrl_mega.config.drafts import draft_method, draft_tokens, speculative_config
from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.config.schema.drafts import DraftsConfig

NGRAM = "rollout.drafts.method=ngram"


@pytest.mark.parametrize(
    "arguments",
    [
        NGRAM,
        "rollout.drafts.method=suffix rollout.drafts.max_tokens=8",
        f"{NGRAM} residency.keep=[]",
        f"{NGRAM} policy.moe.replay=rollout cluster.device=cuda cluster.nodes=2",
        f"{NGRAM} run.deterministic=true",
        "rollout.drafts.method=model rollout.drafts.path=small residency.keep=[]",
        "rollout.drafts.method=eagle3 rollout.drafts.path=head residency.keep=[] policy.moe.replay=rollout",
        "rollout.drafts.method=mtp residency.keep=[]",
        "rollout.options.speculative_config={method:ngram,num_speculative_tokens:3,prompt_lookup_max:4}",
        f"{NGRAM} rollout.options.speculative_config.num_speculative_tokens_per_batch_size=[[1,8,4]]",
    ],
)
def test_possible_drafts_pass(base: Path, arguments: str) -> None:
    check(compose(base, arguments.split()), planned=True)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            "rollout.drafts.method=medusa",
            "rollout.drafts.method = medusa: allowed is one of none, ngram, suffix, model",
        ),
        ("rollout.drafts.method=model", "rollout.drafts.path = null: rollout.drafts.method=model needs the directory"),
        (
            "rollout.drafts.method=eagle3",
            "rollout.drafts.path = null: rollout.drafts.method=eagle3 needs the directory",
        ),
        ("rollout.drafts.method=mtp rollout.drafts.path=x", "rollout.drafts.path = x: rollout.drafts.method=mtp reads"),
        (f"{NGRAM} rollout.drafts.path=small", "rollout.drafts.path = small: rollout.drafts.method=ngram reads no"),
        (f"{NGRAM} rollout.drafts.shortest=9", "rollout.drafts.shortest = 9: allowed is at most rollout.drafts.long"),
        (
            "rollout.options.speculative_config={num_speculative_tokens:3}",
            "rollout.options.speculative_config = {num_speculative_tokens: 3}: a method is missing",
        ),
        (
            "rollout.options.speculative_config=ngram",
            "rollout.options.speculative_config = ngram: allowed is a mapping",
        ),
        (
            "rollout.options.speculative_config={method:ngram}",
            "rollout.options.speculative_config = {method: ngram}: num_speculative_tokens is missing",
        ),
        (
            "rollout.options.speculative_config={method:medusa,model:head,num_speculative_tokens:3}",
            "rollout.options.speculative_config.method = medusa: such drafts have not been tried",
        ),
        (
            "rollout.options.speculative_config={method:eagle3,model:head,num_speculative_tokens:1}",
            "rollout.options.speculative_config.method = eagle3: vLLM would give the drafts random weights",
        ),
        (
            "rollout.drafts.method=mtp policy.moe.replay=rollout",
            "rollout.drafts.method = mtp: its layers have experts of their own",
        ),
        (
            f"{NGRAM} rollout.options.speculative_config.method=suffix",
            "rollout.options.speculative_config.method = suffix: rollout.drafts.method=ngram says ngram",
        ),
        (
            f"{NGRAM} rollout.options.speculative_config.rejection_sample_method=synthetic",
            "rollout.options.speculative_config.rejection_sample_method = synthetic: it accepts draft tokens at random",
        ),
        (
            "rollout.options.speculative_config={method:ngram_gpu,num_speculative_tokens:3} cluster.device=cuda",
            "rollout.options.speculative_config.method = ngram_gpu: such drafts have not been tried",
        ),
        (
            "rollout.drafts.method=suffix run.deterministic=true",
            "rollout.drafts.method = suffix: suffix drafts depend on the engine's earlier answers",
        ),
        (
            "rollout.drafts.method=suffix policy.moe.replay=rollout cluster.device=cuda cluster.nodes=2",
            "rollout.drafts.method = suffix: vLLM's model runner that returns routes on a GPU has no suffix drafts",
        ),
    ],
)
def test_impossible_drafts_are_one_line(base: Path, arguments: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        check(compose(base, arguments.split()))
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_settings_become_vllms() -> None:
    assert speculative_config(RolloutConfig()) == {}
    rollout = RolloutConfig(drafts=DraftsConfig(method="ngram", max_tokens=3))
    wanted = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    assert speculative_config(rollout) == wanted
    rollout.options = {"speculative_config": {"prompt_lookup_max": 9, "num_speculative_tokens": 6}}
    assert speculative_config(rollout) == wanted | {"prompt_lookup_max": 9, "num_speculative_tokens": 6}
    assert (draft_method(rollout), draft_tokens(rollout)) == ("ngram", 6)
    model = speculative_config(RolloutConfig(drafts=DraftsConfig(method="model", path="small")))
    assert model["method"] == "draft_model" and model["draft_load_config"] == {"load_format": "auto"}
    head = speculative_config(RolloutConfig(drafts=DraftsConfig(method="eagle", path="head")))
    assert head == model | {"method": "eagle", "model": "head"}
    layers = speculative_config(RolloutConfig(drafts=DraftsConfig(method="mtp", max_tokens=1)))
    assert layers == {"method": "mtp", "num_speculative_tokens": 1, "draft_load_config": {"load_format": "auto"}}
