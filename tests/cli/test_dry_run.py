"""Dry runs of full-sized runs without model, data or GPU."""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader

from skyrl_mega.cli import dry_run, dry_run_text, refusal
from skyrl_mega.cli.train import main
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import Config
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner import fit, fixes, rates
from skyrl_mega.planner.placement import nodes
from skyrl_mega.planner.times import step_time
from tests.cli import large
from tests.support.machine import within

GIB = 2**30
FREE = "residency.keep=[]"


def run(file: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns standard output of a dry run of at most 20 s on a core; three times as much on a busy core."""
    start = time.process_time()
    assert main(["--config", str(file), *arguments]) == 0
    assert within(time.process_time() - start, 60)
    return capsys.readouterr().out


def values(file: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run(file, capsys, "--dry-run", "--json", *arguments))
    return result


def compose_text(out: str) -> Config:
    """Returns the settings printed at the end of a dry run."""
    given = OmegaConf.create(out.rpartition("\nsettings:\n\n")[2])
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), given))
    assert isinstance(config, Config)
    return config


def merged(tree: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merges nested mappings, the second over the first."""
    return tree | {k: merged(tree.get(k, {}), v) if isinstance(v, dict) else v for k, v in over.items()}


def test_counts_are_written_as_a_person_does() -> None:
    counts = [(1, "rank"), (2, "trajectory"), (1, "micro-batch"), (1024, "micro-batch"), (3, "optimizer step")]
    assert [dry_run_text.counted(*count) for count in counts] == [
        "1 rank", "2 trajectories", "1 micro-batch", "1,024 micro-batches", "3 optimizer steps",
    ]  # fmt: skip


def test_30b_on_64_gpus(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    v = values(file, capsys)
    assert v["model"]["parameters"] == 30_532_122_624
    assert len(v["policy"]) == 32
    # 18 bytes for a parameter; a rank holds 16 experts and half of the rest, 3.62 and 0.78 · 10⁹ parameters.
    memory = v["policy"][0]["memory"]
    assert memory["weights"] == pytest.approx(2 * 4.4008e9, rel=1e-3)
    assert memory["gradients"] == 2 * memory["weights"]
    assert memory["optimizer"] == pytest.approx(12 * (3.624e9 / 4 + 0.7769e9 / 16), rel=1e-3)
    assert v["policy"][9]["experts"] == "16-31" and v["policy"][9]["heads"] == "16-31"
    assert [sorted(node["engines"]) for node in v["nodes"]] == [[]] * 4 + [["0"], ["1"], ["2"], ["3"]]
    assert v["nodes"][1]["policy"] == list(range(8, 16))
    worker = v["engines"]["workers"][7]
    budget = worker["memory"]["kv"] + sum(worker["memory"][k] for k in ("weights", "working", "reserve"))
    assert budget == worker["memory"]["budget"] == int(0.6 * v["gpu_memory"])
    assert sum(worker["memory"]["phases"]["train"].values()) == budget + worker["memory"]["beside"], "it stays"
    assert worker["kv"] == "3"  # 4 key/value heads on 8 workers
    assert v["batch"]["sequences"] == 2560 and v["batch"]["mini_batches"] == 2
    assert v["sync"]["predicted_seconds"] == pytest.approx(61.06e9 / 8 / 50e9, rel=0.01)
    host, whole = v["sync"]["host_seconds"], v["sync"]["sync_seconds"]
    assert 0 < host["later"] < host["checksums"] < 0.1 < host["first"]
    assert whole["later"] == v["sync"]["predicted_seconds"] + host["later"] == v["seconds"]["sync"]
    assert v["seconds"]["step"] == pytest.approx(
        sum(v["seconds"][k] for k in ("generate", "logprobs", "train", "sync"))
    )
    assert v["disk"]["checkpoint"] == 30_532_122_624 * 12
    assert v["disk"]["largest_share"]["rank"] == pytest.approx(30_532_122_624 * 12 / 32, rel=0.001)
    assert v["absent"] == ["models/Qwen3-30B-A3B", "train.parquet"]


def test_a_number_of_tokens_that_is_decided_is_planned_and_told(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    v = values(file, capsys, "policy.micro_tokens=null")
    assert v["config"]["policy"]["micro_tokens"] == v["batch"]["budget"] == 32768
    assert v["notes"][0] == "policy.micro_tokens=null is 32768 here: the largest of 4096, 8192, 16384, 32768"


def test_tables_line_up_and_are_compact(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(file, capsys, "--dry-run")
    text = out
    assert text.startswith("it fits 8 nodes: of 79.10 GiB of a GPU, "), "the answer comes first"
    assert "\nrun:\n" not in text, "the settings are for who asks"
    with_settings = run(file, capsys, "--dry-run", "--settings")
    assert with_settings.startswith(out.partition("planned in")[0]) and compose_text(with_settings) == compose(file)
    assert max(map(len, text.splitlines())) <= 120
    lines = text.splitlines()
    start = lines.index("policy: 32 ranks, TP2 DP16 EP8 EDP4")
    assert len(lines[start + 1 : lines.index("", start)]) == 1 + 8, "ranks that hold the same are one line"
    memory = [line for line in lines if re.match(r"  0-31 +\d", line)]
    assert len(memory) == 1, "ranks that need the same are one line"
    sections = ("memory of policy", "engines: 4", "nodes", "batch", "weight sync", "seconds of an RL step")
    assert [part for part in sections if f"\n{part}" not in text] == []
    assert "\nnodes, and estimated GiB of host memory; what a node has is not known, nor checked (cluster.host" in text
    limited = run(file, capsys, "--dry-run", "cluster.host_memory_gib=2000")
    assert "\nnodes, and estimated GiB of host memory; a node has 2,000 (cluster.host_memory_gib)\n" in limited
    assert lines[-3:] == [
        "note: models/Qwen3-30B-A3B is not here and was not checked",
        "note: train.parquet is not here and was not checked",
        "nothing was started (--dry-run)",
    ]


def test_states_of_a_sequence_have_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Path(__file__).parents[2] / "configs" / "dapo_qwen3_5.yaml"
    text = run(recipe, capsys, "--dry-run")
    assert "\n  a sequence also keeps 2 states of 15.4 MiB in each worker" in text
    assert "\n  with one turn, rollout.options.enable_prefix_caching=false saves one" in text
    text = run(recipe, capsys, "--dry-run", "rollout.options.enable_prefix_caching=false")
    assert "keeps 1 state of 15.4 MiB" in text and "saves one" not in text


def test_235b_on_512_gpus(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    v = values(file, capsys, *large.HUGE)
    assert v["policy"][255]["layers"] == "83-93"
    assert len(v["nodes"]) == 64


def test_shared_gpus_hold_both(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    v = values(file, capsys, "cluster.shared=true", "cluster.nodes=4", "rollout.memory_fraction=0.15")
    assert [len(node["policy"]) for node in v["nodes"]] == [8] * 4
    assert [list(node["engines"]) for node in v["nodes"]] == [["0"], ["1"], ["2"], ["3"]]
    assert any("cluster.shared=true" in note for note in v["notes"])
    s = v["shared"]
    assert list(s["policy"]) == list(s["left"]) == ["generate", "logprobs", "train", "sync"]
    assert s["margin"] == min(s["left"].values()) == s["left"]["train"]
    for phase, policy in s["policy"].items():
        assert s["left"][phase] == v["gpu_memory"] - policy - s["engine"][phase] - s["beside"]
    text = dry_run_text.text(v)
    assert f"\n  at least {s['margin'] / GIB:.2f} GiB are left" in text
    assert max(map(len, text[text.index("a shared GPU by phase") :].splitlines()[:8])) <= 120


def test_a_table_has_the_fullest_gpu_of_each_phase(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks the fullest GPU of each phase: a first stage holds an embedding and most micro-batches in flight, a last
    stage head and logits.
    """
    layout = "policy.layout={tensor: 2, pipeline: 4, expert: 4}"
    v = values(file, capsys, "cluster.shared=true", "cluster.nodes=4", "rollout.memory_fraction=0.6", layout, FREE)
    s = v["shared"]
    assert len({*s["ranks"].values()}) > 1
    for phase, rank in s["ranks"].items():
        most = max(sum(other["memory"]["phases"][phase].values()) for other in v["policy"])
        assert s["policy"][phase] == most == sum(v["policy"][rank]["memory"]["phases"][phase].values())
        assert s["left"][phase] == v["gpu_memory"] - most - s["engine"][phase] - s["beside"]
    assert f"\n  train  {s['ranks']['train']:>7}  " in dry_run_text.text(v)


def test_gpus_of_their_own_have_no_table_of_shared_ones(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    v = values(file, capsys)
    assert v["shared"] is None and "a shared GPU" not in dry_run_text.text(v)


def test_a_reference_is_never_beside_the_policys_weights(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_one = values(file, capsys)["policy"][0]["memory"]
    without = values(file, capsys, "algorithm.kl.coefficient=0")["policy"][0]["memory"]
    assert with_one["reference"] == 64 * 2**20 and without["reference"] == 0
    assert with_one["peak"] == without["peak"], "training takes more than log-probs with the buffer"
    host = values(file, capsys)["nodes"][0]["host_memory"]["reference"]
    assert host == 8 * with_one["weights"], "one set of weights for each of eight ranks, in host memory"


def test_graphs_and_fixed_segments_take_memory(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, graphs = (values(file, capsys, f"rollout.eager={e}") for e in ("true", "false"))
    kv = [v["engines"]["workers"][0]["memory"]["kv"] for v in (eager, graphs)]
    assert kv[0] - kv[1] == 2 * GIB
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8")
    fixed = values(file, capsys)
    assert fixed["policy"][0]["memory"]["peak"] - eager["policy"][0]["memory"]["peak"] == 3 * GIB


def test_a_tight_shared_gpu_is_said_to_be_tight(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    v = values(file, capsys, "cluster.shared=true", "cluster.nodes=4", "rollout.memory_fraction=0.45")
    assert v["shared"]["margin"] < 0
    lacks = f"lacks {-v['shared']['margin'] / GIB:.1f} of 79.10 GiB; about"
    assert dry_run_text.text(v).startswith(f"tight on 4 nodes: by the estimates the fullest shared GPU {lacks}")
    assert f"\n  {-v['shared']['margin'] / GIB:.2f} GiB are lacking in phase train; " in dry_run_text.text(v)
    assert any(note.startswith("tight: by the estimates a shared GPU lacks") for note in v["notes"])


def test_the_first_line_is_about_what_lacks_most(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks the first line for an engine or a critic without enough memory next to a policy with enough memory."""
    v = values(file, capsys, "rollout.memory_fraction=0.982")
    assert dry_run_text.text(v).startswith("tight on 8 nodes: by the estimates an engine worker (")
    v = values(file, capsys)
    v["critic"] = [{"memory": {"peak": v["gpu_memory"] + GIB}}]
    assert dry_run_text._first_line(v).startswith(
        "tight on 8 nodes: by the estimates the fullest critic rank (80.10 GiB)"
    )


def test_a_reference_of_its_own_has_nodes_of_its_own(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["cluster.nodes=9", "reference.layout={tensor: 2, expert: 8}", "reference.ranks=8"]
    v = values(file, capsys, *settings)
    assert v["nodes"][4]["reference"] == list(range(8)), "after the policy, before the engines"
    memory = v["reference"][0]["memory"]
    assert (memory["gradients"], memory["optimizer"], memory["activations"]) == (0, 0, 0)
    assert v["policy"][0]["memory"]["reference"] == 0 and v["nodes"][0]["host_memory"]["reference"] == 0
    assert "memory of reference ranks" in dry_run_text.text(v)


def test_a_critic_has_nodes_and_memory_of_its_own(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plans a critic: trained like the policy, without a choice of tokens and without a weight sync."""
    settings = ["algorithm=gae", "cluster.nodes=9", "critic.layout={tensor: 2, expert: 8}", "critic.ranks=8"]
    v, without = values(file, capsys, *settings), values(file, capsys, "algorithm=gae", *LESS)
    assert v["nodes"][4]["critic"] == list(range(8)), "after the policy, before the engines"
    memory = v["critic"][0]["memory"]
    assert memory["gradients"] > 0 and memory["optimizer"] > 0 and memory["activations"] > 0
    assert (memory["logits"], memory["sync"], memory["reference"]) == (0, 0, 0)
    assert v["seconds"]["critic"] > 0 == without["seconds"]["critic"]
    assert v["disk"]["checkpoint"] > 1.9 * without["disk"]["checkpoint"]
    assert "memory of critic ranks" in dry_run_text.text(v) and "critic" not in dry_run_text.text(without)


LESS = ["algorithm.advantage=grpo", "algorithm.whiten=none"]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["critic.layout.tensor=3", "critic.ranks=6"], "critic.layout.tensor: 3 does not divide"),
        (["critic.layout.tensor=16", "critic.ranks=8"], "critic.layout"),
        (["critic.ranks=1", "critic.layout.tensor=1"], "critic: rank 0 needs about"),
    ],
)
def test_a_critic_that_cannot_be_is_refused(
    file: Path, settings: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(file), "--dry-run", "algorithm=gae", "cluster.nodes=12", *settings]) == 2
    assert line in capsys.readouterr().err


def test_a_suggestion_leaves_room_for_a_critic(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(run(file, capsys, "algorithm=gae", "--suggest", "64", "--json"))
    for suggestion in result["found"][::60]:
        config = compose(file, ["algorithm=gae", *suggestion["overrides"]])
        hf, _ = dry_run.checked(config)
        assert refusal.find_error(config, hf, planned=True, strict=True) is None
        assert sum(len(n.policy) + len(n.critic) + n.workers for n in nodes(config)) <= 64


@pytest.mark.parametrize(
    ("gpus", "given"),
    [(32, ["critic.ranks=8", "policy.layout.expert=8"]), (48, ["critic.layout={tensor: 2, expert: 16}"])],
    ids=["ranks of its own", "a layout of its own"],
)
def test_what_the_critic_cannot_follow_is_not_suggested(
    file: Path, gpus: int, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks every suggestion for a critic with the layout or ranks of the policy; many policy layouts are invalid
    there.
    """
    result = json.loads(run(file, capsys, "algorithm=gae", *given, "--suggest", str(gpus), "--json"))
    assert result["found"] and result["tried"] > len(result["found"])
    for suggestion in result["found"][::20]:
        config = compose(file, ["algorithm=gae", *given, *suggestion["overrides"]])
        hf, _ = dry_run.checked(config)
        assert refusal.find_error(config, hf, planned=True, strict=True) is None


def test_nothing_is_suggested_beside_a_critic_that_cannot_be(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["algorithm=gae", "critic.ranks=8", "critic.layout.tensor=8"]
    assert main(["--config", str(file), *given, "--suggest", "32"]) == 2
    assert "critic.layout.tensor: 8 does not divide the model's 4" in capsys.readouterr().err


def test_long_sequences_set_the_memory(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    v = values(file, capsys, "rollout.max_response_tokens=28672")
    assert v["batch"]["oversize"] and v["batch"]["row"]["tokens"] == 32768
    assert v["policy"][0]["memory"]["activations"] > 48 * 16384 * 2048 * 2  # half of the tokens, every layer's input
    assert any("a micro-batch of its own" in note for note in v["notes"])


def test_the_exchange_of_context_ranks_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model has 4 key/value heads, which 4 context ranks split and 8 do not."""
    four = ["policy.layout.tensor=1", "policy.layout.context=4", "policy.layout.context_exchange=all_to_all"]
    heads = run(file, capsys, "--dry-run", *four)
    assert " Ulysses4 " in heads and "CP4" not in heads
    assert re.search(r"a context rank receives \d+ MiB with all_to_all; \d+ MiB with ring \(docs/speed\.md\)", heads)
    ring = run(file, capsys, "--dry-run", four[0], "policy.layout.context=8")
    assert " CP8 " in ring and "MiB with ring; all_to_all does not fit the heads (docs/speed.md)" in ring


def test_what_engines_do_at_once_and_what_one_should_know_of_them(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plans four engines of eight workers for 2560 trajectories and 4 key/value heads."""
    v = values(file, capsys)
    engines = v["engines"]
    tokens = engines["workers"][0]["memory"]["tokens"]
    assert engines["usual"] == min(engines["concurrency"], 640, int(tokens / v["batch"]["mean"]))
    assert engines["usual"] + engines["waiting"] == 640
    assert any(note.startswith("rollout.tensor=8 is above the model's 4 key/value heads") for note in v["notes"])
    assert not any("truncated" in note for note in v["notes"])
    seconds = v["seconds"]["generate"]

    v = values(file, capsys, "rollout.tensor=4", f"rollout.trajectory_timeout_s={seconds / 2}", "rollout.eager=true")
    assert not any("key/value heads" in note for note in v["notes"])
    assert any("includes the wait for an engine" in note for note in v["notes"])


def test_an_eager_engine_is_planned_slower(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compares eager with graphs: 300 µs more in each of 48 layers, per token of the longest response or more."""
    graphs, eager = (values(file, capsys, f"rollout.eager={eager}")["seconds"]["generate"] for eager in (False, True))
    assert eager - graphs > 4 * 500 * 48 * 300e-6
    assert values(file, capsys)["seconds"]["generate"] == graphs


def test_a_run_on_a_cpu_is_planned_in_host_memory(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    v = values(inputs / "config.yaml", capsys)
    assert v["gpu_memory"] is None and v["sync"] is None and v["seconds"] is None
    assert len(v["nodes"]) == 1 and v["nodes"][0]["host_memory"]["device"] > 0
    assert v["policy"][0]["memory"]["reserve"] == 0
    assert "of host memory" in run(inputs / "config.yaml", capsys, "--dry-run")


@pytest.mark.parametrize(("gpus", "model"), [(64, []), (512, large.HUGE)], ids=["30B", "235B"])
def test_what_is_suggested_fits(file: Path, gpus: int, model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(run(file, capsys, *model, "--suggest", str(gpus), "--json"))
    assert result["complete"] and len(result["found"]) > 20
    assert all(s["peak"] <= 79.1 * GIB for s in result["found"])
    for suggestion in result["found"][::40]:
        config = compose(file, [*model, *suggestion["overrides"]])
        hf, _ = dry_run.checked(config)
        assert refusal.find_error(config, hf, planned=True, strict=True) is None
        parallel, _ = fit.parallel_of(config)
        seconds = step_time(rates.with_measured(config)[0], architecture(hf).describe(hf), parallel).step
        assert seconds == pytest.approx(suggestion["seconds"])
        assert sum(len(n.policy) + n.workers for n in nodes(config)) <= gpus


def test_suggestions_for_people(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(file, capsys, "--suggest", "cluster.nodes=8")
    table, _, paste = out.partition(
        "\nsettings for the file, in place of those that it has in the same groups (--json has them as arguments):\n"
    )
    paste, _, arguments = paste.partition("\n# 1 as arguments: ")
    dry_run.checked(compose(file, shlex.split(arguments)))
    first_table = table.partition("\n0: the settings as they are")[0]
    numbered = [line.split() for line in first_table.splitlines() if re.match(r" +\d+ ", line)]
    assert [int(cells[0]) for cells in numbered] == [*range(len(numbered))] and 2 <= len(numbered) <= 1 + 10
    given, *seconds = (float(cells[-2]) for cells in numbered)
    assert all(later > 0.97 * max(seconds[:i], default=0) - 0.1 for i, later in enumerate(seconds))
    assert float(numbered[1][-1].rstrip("%")) == pytest.approx(100 * (1 - seconds[0] / given), abs=0.6)
    errors = " cannot run alone: "  # an error is one line
    assert max(len(line) for line in table.splitlines() if errors not in line) <= 120
    assert yaml.load(paste, get_yaml_loader())  # raises for duplicate keys
    for text in re.split(r"# \d\n", paste)[1:]:
        text = re.sub(r"(?m)^# ", "", text)
        pasted = tmp_path / "pasted.yaml"
        pasted.write_text(yaml.safe_dump(merged(yaml.safe_load(large.SETTINGS), yaml.safe_load(text))))
        dry_run.checked(compose(pasted))
    for given, says in (
        ("cluster.gpu_memory_gib=40", " GPUs are enough\n"),
        # A sequence is in the cache of one replica, so larger engines do not help.
        (
            "rollout.max_response_tokens=5000000",
            "or reference and critic leave it no GPU (reference.ranks, critic.ranks)\n",
        ),
    ):
        assert main(["--config", str(file), "--suggest", "8", given]) == 2
        assert capsys.readouterr().out.endswith(says)


def test_what_fills_an_engine_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(file), "--dry-run", "rollout.concurrency=60000"]) == 2
    message = capsys.readouterr().err
    assert "most of it for rollout.concurrency = 60000 at once" in message
    (offered,) = re.findall(r"nearest that works?: (rollout.concurrency=\d+)", message)
    assert main(["--config", str(file), "--dry-run", offered]) == 0


def test_an_optimizer_is_streamed_where_nothing_fits_without(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Searches for a policy of 4 GPUs, with 12 bytes of state for a quarter of the parameters; 64 GPUs have room."""
    of_eight, of_many = (json.loads(run(file, capsys, "--suggest", n, "--json"))["found"] for n in ("8", "64"))
    streamed = "policy.optimizer.streamed=true"
    assert of_eight and all(streamed in suggestion["overrides"] for suggestion in of_eight)
    assert not all(streamed in suggestion["overrides"] for suggestion in of_many)
    config = compose(file, of_eight[0]["overrides"])
    dry_run.checked(config)
    with pytest.raises(UserError, match=r"policy: rank 0 needs about|lacks|does not fit"):
        dry_run.checked(compose(file, [o for o in of_eight[0]["overrides"] if not o.startswith("policy.optimizer")]))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--suggest", "12"], "nearest that work: 8, 16"), (["--suggest", "cluster.device=cpu"], "cluster.device = cpu")],
)
def test_a_number_that_no_nodes_make(
    file: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(file), *arguments]) == 2
    assert says in capsys.readouterr().err


def test_what_sandboxes_may_take_together_is_planned(
    inputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixes, "SECONDS", 0.5)  # nothing fits: the search for a fix would try everything
    options = "environment.options={text2sql: {sandbox: {total_mib: 2048, disk_mib: 10}}, swe: {}}"
    sizes = ["data.prompts_per_step=20", "data.samples_per_prompt=10", options]
    v = values(inputs / "config.yaml", capsys, *sizes, "cluster.host_memory_gib=60")
    first = v["nodes"][0]["host_memory"]
    assert first["sandboxes"] == (2048 + 64 * 10 + 8192 + 200 * 64) * 2**20
    assert v["nodes"][0]["host_memory_total"] == sum(first.values())
    assert main(["--config", str(inputs / "config.yaml"), "--dry-run", *sizes, "cluster.host_memory_gib=20"]) == 2
    assert "sandboxes 23.1" in capsys.readouterr().err


SHARED = "cluster.nodes=4 cluster.shared=true rollout.memory_fraction=0.3 rollout.engines="


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (SHARED + "3", "rollout.engines=3 of 8 GPUs: 8 of the policy's 32 GPUs have no engine and generate nothing"),
        (SHARED + "4", None),
        (
            "rollout.engines=3",
            "8 of 64 GPUs are unused: policy, reference and engines (rollout.engines=3 of 8 GPUs) ",
        ),
        ("rollout.engines=4", None),
    ],
)
def test_gpus_with_nothing_to_do_are_told(tmp_path: Path, settings: str, told: str | None) -> None:
    config = compose(large.write(tmp_path), settings.split())
    notes = dry_run.values(config, *dry_run.checked(config))["notes"]
    matching = [note for note in notes if "are unused" in note or "no engine" in note]
    assert len(matching) == bool(told) and all(note.startswith(told or "") for note in matching)


@pytest.mark.parametrize(("slots", "said"), [("3", True), ("null", False), ("100000", False)])
def test_environments_that_engines_wait_for_are_noted(slots: str, said: bool) -> None:
    config = compose("configs/searchr1_30b.yaml", [f"environment.slots={slots}"])
    notes = dry_run.values(config, *dry_run.checked(config))["notes"]
    assert any(note.startswith("environment.slots = 3: engines have places for up to ") for note in notes) is said


def test_a_critic_without_room_is_offered_an_optimizer_in_host_memory(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["algorithm.advantage=gae", "critic.ranks=8", "policy.recompute=none", "policy.optimizer.streamed=true"]
    given = [*small, "cluster.nodes=4", "policy.ranks=16", "rollout.engines=1"]
    assert main(["--config", str(file), "--dry-run", *given]) == 2
    message = capsys.readouterr().err
    assert (
        message.startswith("error: critic: rank 0 needs about")
        and "nearest that work: critic.optimizer.streamed" in message
    )
    assert main(["--config", str(file), "--dry-run", *given, "critic.optimizer.streamed=true"]) == 0
