"""Results and duration of `--suggest` with policy and engines on shared GPUs."""

from __future__ import annotations

import io
import itertools
import json
import re
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_mega.cli import dry_run, refusal, suggest_simulated, suggest_text
from skyrl_mega.cli.suggest_progress import SearchProgress
from skyrl_mega.cli.train import main
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import Config
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import rates, search
from skyrl_mega.planner.search import Suggestion, ordered
from tests.cli import large
from tests.cli.test_dry_run_notes import noted
from tests.support.machine import within

SHARED_235B = ["model.path=models/Qwen3-235B-A22B", "cluster.nodes=32", "cluster.shared=true", "policy.ranks=256"]
SECONDS = 60


def pipeline(overrides: list[str]) -> int:
    """Returns the pipeline stages of a suggestion."""
    return next(int(text.partition("=")[2]) for text in overrides if text.startswith("policy.layout.pipeline="))


def suggestion(seconds: float, stages: int, peak: int) -> Suggestion:
    return Suggestion(ParallelDims(64, pipeline=stages), Config(), peak, 0, seconds)


def crowded(s: Suggestion) -> bool:
    """Returns True if the test gave the suggestion a peak."""
    return s.peak > 0


@given(
    st.lists(
        st.tuples(st.floats(1.0, 2.0), st.sampled_from([1, 2, 4, 8]), st.integers(0, 1)), max_size=12, unique=True
    ),
    st.randoms(use_true_random=False),
)
def test_a_tie_is_ordered_by_room_and_cuts_and_ties_by_their_times(
    made: list[tuple[float, int, int]], mix: Random
) -> None:
    suggestions = [suggestion(*one) for one in made]
    first = [*ordered(suggestions, crowded)]
    mix.shuffle(suggestions)
    assert [*ordered(suggestions, crowded)] == first, "it does not depend on what was tried first"
    assert sorted(s.seconds for s in first) == sorted(seconds for seconds, *_ in made)
    while first:
        fastest = min(s.seconds for s in first)
        tie = [s for s in first if s.seconds <= fastest * 1.03]
        assert first[: len(tie)] == sorted(tie, key=lambda s: (s.peak, s.parallel.pipeline, s.seconds))
        first = first[len(tie) :]


def test_235b_fits_256_gpus_that_policy_and_engines_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rates, "FOLDER", tmp_path)  # with launches that take next to no time, many layouts tie
    file, start = large.write(tmp_path), time.process_time()
    assert main(["--config", str(file), *SHARED_235B, "--suggest", "--json"]) == 0
    assert within(time.process_time() - start, SECONDS)
    result = json.loads(capsys.readouterr().out)
    assert result["complete"] and result["gpus"] == 256 and len(result["found"]) >= 10
    stages, seconds = zip(*((pipeline(s["overrides"]), s["seconds"]) for s in result["found"]), strict=True)
    tie = [stages[i] for i, of in enumerate(seconds) if of <= 1.03 * min(seconds)]
    assert [*stages[: len(tie)]] == sorted(tie) and tie[0] < tie[-1], "what cuts the model least comes first"
    for suggestion in result["found"][:: len(result["found"]) // 2]:
        config = compose(file, [*SHARED_235B, *suggestion["overrides"]])
        hf, _ = dry_run.checked(config)
        assert refusal.find_error(config, hf, planned=True, strict=True) is None
        assert config.residency.keep is not None, "an engine's weights alone take 55 GiB of eight GPUs"
        assert config.cluster.nodes == 32 and config.policy.ranks == 256


def test_hosts_without_memory_for_what_leaves_are_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = large.write(tmp_path)
    shared = ["cluster.nodes=2", "cluster.shared=true", "policy.ranks=16", "algorithm.kl.coefficient=0"]
    keeps = []
    for gib in (2000, 110):
        settings = [*shared, f"cluster.host_memory_gib={gib}"]
        assert main(["--config", str(file), *settings, "--suggest", "--json"]) == 0
        suggestions = json.loads(capsys.readouterr().out)["found"]
        for suggestion in suggestions[:: max(1, len(suggestions) // 4)]:
            config = compose(file, [*settings, *suggestion["overrides"]])
            hf, _ = dry_run.checked(config)
            assert refusal.find_error(config, hf, planned=True, strict=True) is None
        keeps.append({text for s in suggestions for text in s["overrides"] if text.startswith("residency.keep")})
    enough, little = keeps
    assert enough > little > set() and 'residency.keep=["optimizer"]' in enough - little


ONE_NODE = [
    *("cluster.nodes=1", "policy.ranks=8", "rollout.engines=1", "policy.micro_tokens=16384"),
    *("policy.precision.recipe=fp8_blockwise", "weights.wire=fp8"),
]


@pytest.mark.parametrize("parameters", ["model", "fp8"])
def test_an_optimizer_is_streamed_only_beside_parameters_that_take_it(
    capsys: pytest.CaptureFixture[str], parameters: str
) -> None:
    """Searches a node where nothing fits with the optimizer on the GPUs."""
    file, given = Path("configs/searchr1_30b.yaml"), [*ONE_NODE, f"policy.precision.parameters={parameters}"]
    code = main(["--config", str(file), *given, "--suggest", "8", "--json"])
    suggestions = json.loads(capsys.readouterr().out)["found"]
    streamed = [s for s in suggestions if "policy.optimizer.streamed=true" in s["overrides"]]
    assert code == (0 if suggestions else 2)
    assert bool(streamed) == (parameters == "model")
    for suggestion in suggestions:
        config = compose(file, [*given, *suggestion["overrides"]])
        hf, _ = dry_run.checked(config)
        assert refusal.find_error(config, hf, planned=True, strict=True) is None


def room(config: Config) -> str:
    """Returns the beginning of the dry run's note on memory."""
    return next((note.split(":")[0] for note in noted(config) if note.startswith(("close:", "tight:"))), "")


FP8 = ["policy.precision.recipe=fp8_blockwise", "policy.precision.parameters=fp8"]


def test_layouts_with_parameters_in_fp8_pass_every_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_mega.planner.search.SECONDS", 3)
    file, given = Path("configs/searchr1_30b.yaml"), [*FP8, "weights.wire=fp8"]
    assert main(["--config", str(file), *given, "--suggest", "--json"]) == 0
    suggestions = json.loads(capsys.readouterr().out)["found"]
    rooms = [s["room"] for s in suggestions[:10]]
    assert rooms == [room(compose(file, [*given, *s["overrides"]])) for s in suggestions[:10]] and len({*rooms}) > 1
    for suggestion in suggestions[:: max(1, len(suggestions) // 10)]:
        config = compose(file, [*given, *suggestion["overrides"]])
        hf, _ = dry_run.checked(config)
        assert refusal.find_error(config, hf, planned=True, strict=True) is None


LONG = ["rollout.max_response_tokens=30720", "model.max_length=32768"]


@pytest.mark.parametrize("given", [LONG, []], ids=["long", "short"])
def test_layers_go_to_host_memory_where_sequences_are_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    monkeypatch.setattr("skyrl_mega.planner.search.SECONDS", 4)
    file = Path("configs/dapo.yaml")
    assert main(["--config", str(file), *given, "--suggest", "--json"]) == 0
    suggestions = json.loads(capsys.readouterr().out)["found"]
    moved = [s for s in suggestions if "policy.offload_layers=0" not in s["overrides"]]
    assert bool(moved) == bool(given)
    for suggestion in moved[:: max(1, len(moved) // 5)]:
        config = compose(file, [*given, *suggestion["overrides"]])
        hf, _ = dry_run.checked(config)
        assert refusal.find_error(config, hf, planned=True, strict=True) is None


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (FP8, "weights.wire is auto"),
        (["policy.precision.recipe=fp8_current", *FP8[1:], "weights.wire=fp8"], "only numbers of recipe fp8_blockwise"),
        (["critic.optimizer.streamed=true"], "algorithm.advantage=grpo has no critic"),
    ],
)
def test_settings_that_no_layout_mends_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, given: list[str], line: str
) -> None:
    monkeypatch.setattr("skyrl_mega.planner.search.SECONDS", 2)
    assert main(["--config", "configs/searchr1_30b.yaml", *given, "--suggest"]) == 2
    assert line in capsys.readouterr().err


SERVED = ["policy.precision.recipe=fp8_blockwise", "weights.wire=fp8", "rollout.options.quantization=fp8_per_block"]


def test_engines_have_the_blocks_of_the_policy_where_some_have(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches for Qwen3-4B: the fastest engine, over eight GPUs, has parts off the block size."""
    monkeypatch.setattr("skyrl_mega.planner.search.SECONDS", 4)
    for settings, sizes in (([], {8}), (SERVED, {4})):
        assert main(["--config", "configs/dapo_4b.yaml", *settings, "--suggest", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert {f"rollout.tensor={size}" for size in sizes} == {
            text for s in result["found"] for text in s["overrides"] if text.startswith("rollout.tensor=")
        }
        assert result["notes"] == []


def test_engines_with_other_blocks_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_mega.planner.search.SECONDS", 2)
    monkeypatch.setattr("skyrl_mega.planner.engine_blocks.partial_block", lambda config, d: "96 columns")
    assert main(["--config", "configs/dapo_4b.yaml", *SERVED, "--suggest"]) == 0
    assert "\nnote: the engines of 1" in capsys.readouterr().out


def test_a_streamed_optimizer_that_parameters_in_fp8_do_not_take_is_told_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_mega.planner.search.SECONDS", 2)
    given = ["policy.optimizer.streamed=true", "weights.wire=fp8", "policy.precision.recipe=fp8_blockwise"]
    for parameters, expected in (("model", 0), ("fp8", 1)):
        each = [*given, f"policy.precision.parameters={parameters}"]
        assert main(["--config", "configs/searchr1_30b.yaml", *each, "--suggest"]) == 0
        assert capsys.readouterr().out.count("\nnote: policy.optimizer.streamed=true was left out: ") == expected


def test_nothing_takes_turns_on_gpus_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_mega.planner.search.SECONDS", 4)
    file, apart = "configs/searchr1_30b.yaml", ["cluster.shared=false", "residency.keep=[]"]
    assert main(["--config", file, *apart, "--suggest", "--json"]) == 0
    (first, *_) = json.loads(capsys.readouterr().out)["found"]
    assert "residency.keep=null" in first["overrides"]
    assert not any("takes turns" in note for note in noted(compose(Path(file), [*apart, *first["overrides"]])))


@pytest.mark.parametrize(
    ("given", "gpus", "why"),
    [
        (
            [],
            "2",
            r"the nearest \(PP2, .*, policy.micro_tokens=4096\) lacks 71.1 GiB of a GPU's 79.1; 8 GPUs are enough",
        ),
        (["cluster.shared=false"], "2", r"the nearest \(.*\) lacks [\d.]+ GiB of a GPU's 79.1; 8 GPUs"),
        (
            ["cluster.host_memory_gib=50"],
            "32",
            r"none the host memory; cluster.host_memory_gib = 50: node 0 needs about .*; give more of cluster.host",
        ),
    ],
    ids=["shared", "apart", "hosts"],
)
def test_where_nothing_fits_it_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, given: list[str], gpus: str, why: str
) -> None:
    monkeypatch.setattr("skyrl_mega.planner.search.SECONDS", 8)
    assert main(["--config", "configs/searchr1_30b.yaml", *given, "--suggest", gpus]) == 2
    out = capsys.readouterr().out
    assert re.search(why, out), out
    assert out.count("\n") == 1


DEEPSEEK = ["--config", "configs/dapo.yaml", "model.path=models/DeepSeek-V3", "run.name=x", "--suggest"]


def test_a_model_without_an_engine_in_a_node_has_engines_of_several_nodes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rates, "FOLDER", tmp_path)  # measured rates would decide which engines are the fastest
    given = "rollout.options={enable_expert_parallel: true, data_parallel_size: 2}"  # does not narrow the search
    assert main([*DEEPSEEK, "256", "cluster.nodes=32", given]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^note: engines of 1.* lie on several nodes, .* a run refuses them$", out, re.MULTILINE), out
    assert re.search(r"engines 4 × TP8 DP8 EP", out) and "rollout.options.data_parallel_size=8" in out
    monkeypatch.setattr("skyrl_mega.planner.search.SECONDS", 1)
    assert main([*DEEPSEEK, "16"]) == 2
    out = capsys.readouterr().out
    assert re.search(r"no engine inside a node holds the model, .* 32 GPUs .* on 4 nodes, .* 16 H200s", out), out
    assert out.count("\n") == 1


def test_the_first_row_is_the_dry_run_of_the_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_mega.planner.search.SECONDS", 1)
    file = "configs/searchr1_30b.yaml"
    assert main(["--config", file, "--suggest", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert main(["--config", file, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    given, first = result["given"], result["rows"][0]
    assert given["why"] is None and given["gpus"] == 32
    assert given["free"] == plan["shared"]["margin"] and given["room"] == ""
    assert given["kv_tokens"] == plan["engines"]["workers"][0]["memory"]["tokens"]
    assert given["host"] == max(node["host_memory_total"] for node in plan["nodes"])
    seconds = plan["seconds"]
    assert given["seconds"] == pytest.approx(seconds["step"], abs=seconds["sync"] + 0.1)
    assert first["index"] == 0 and first["saves"] == pytest.approx(1 - first["seconds"] / given["seconds"])
    assert first["overrides"] == result["found"][0]["overrides"]
    assert main(["--config", file, "--dry-run", "--json", *first["overrides"]]) == 0
    bar = json.loads(capsys.readouterr().out)["time"]["run"]["factors"]
    assert result["factors"] == pytest.approx(bar, rel=0.1), "evaluations and the planned sync are missing"
    assert not result["simulated"]["rows"] and "simulations ended after" in result["simulated"]["note"]


def test_settings_that_do_not_fit_say_why_above_those_that_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_mega.planner.search.SECONDS", 1)
    settings = ["residency.keep=null", "rollout.memory_fraction=0.9"]
    assert main(["--config", "configs/searchr1_30b.yaml", *settings, "--suggest"]) == 0
    out = capsys.readouterr().out
    assert "\n0, the settings as they are, cannot run: rollout.memory_fraction = 0.9: on shared GPUs" in out
    assert re.search(r"\n +1  .* –\n", out) and not re.search(r"\n +0  ", out)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Presses Ctrl-C while the search evaluates its `number`-th settings."""
    evaluate, count = search._evaluate, itertools.count(1)

    def interrupted(*given: Any) -> search.Evaluated:
        if next(count) == number:
            signal.raise_signal(signal.SIGINT)
        return evaluate(*given)

    monkeypatch.setattr(search, "_evaluate", interrupted)


def test_ctrl_c_ends_the_search_and_what_was_not_tried_is_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupt_at(monkeypatch, 30)
    assert main(["--config", "configs/searchr1_30b.yaml", "--suggest", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert signal.getsignal(signal.SIGINT) == before
    assert result["stopped"] and not result["complete"] and result["tried"] <= 30 and result["found"]
    assert result["simulated"] is None
    config = compose(Path("configs/searchr1_30b.yaml"), [])
    hf, _ = dry_run.checked(config)
    layouts = [*search._layouts(config, architecture(hf).describe(hf), 32)]
    assert result["layouts"] + len(result["untried"]) == len(layouts)
    assert result["cut"].startswith("the search was cut short by Ctrl-C; not tried: ")
    with_tp4 = sum(parallel.tensor == 4 for parallel, _ in layouts)
    assert f"{len(result['untried'])} of {len(layouts)} layouts" in result["cut"]
    assert f"{with_tp4} with TP4" in result["cut"]


def test_a_search_ended_before_anything_fits_does_not_say_that_nothing_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(monkeypatch, 1)
    assert main(["--config", "configs/searchr1_30b.yaml", "--suggest", "2"]) == 2
    out = capsys.readouterr().out
    assert out.startswith("nothing was found for 2 GPUs, of 1 settings tried; the search was cut short by Ctrl-C; not ")
    assert out.endswith("; let the search end to see what fits\n") and out.count("\n") == 1


def test_a_cut_names_its_reason_and_the_layouts_by_policy_ranks() -> None:
    untried = tuple(
        ParallelDims(ranks, tensor=tensor, expert=expert)
        for ranks, tensor, expert in ((8, 2, 1), (8, 2, 2), (8, 1, 1), (16, 4, 1))
    )
    line = suggest_text.cut_text(search.SearchResult(32, 7, (), False, layouts=2, untried=untried))
    assert line.startswith(
        "the search was cut short after 40 s of a core, its limit; not tried: 4 of 6 layouts (of 8 policy ranks 1 with "
        "TP1, 2 with TP2; of 16 policy ranks 1 with TP4)"
    )
    line = suggest_text.cut_text(search.SearchResult(32, 7, (), False, layouts=2, stopped=True))
    assert "by Ctrl-C; not tried: no whole layout of 2, " in line


class Stream(io.StringIO):
    """A terminal or a file that keeps its text."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize(("terminal", "due"), [(True, [3.0, 3.5, 7.0, 7.5, 12.0]), (False, [3.0, 12.0])])
def test_progress_is_printed_from_three_seconds_on(terminal: bool, due: list[float]) -> None:
    times = [0.0, 0.5, 2.9, 3.0, 3.2, 3.5, 7.0, 7.5, 12.0]
    stream, clock = Stream(terminal), iter(times)
    progress = SearchProgress(stream, lambda: next(clock))
    printed = []
    for tried, now in enumerate(times[1:], start=1):
        before = len(stream.getvalue())
        assert progress(search.SearchState(8, 1000 * tried, suggestion(88.04, 2, 0) if tried > 3 else None))
        if len(stream.getvalue()) > before:
            printed.append(now)
    assert printed == due
    text = stream.getvalue()
    assert "3 s: 3,000 settings tried for 8 GPUs, none fits so far; Ctrl-C ends the search" in text
    assert "12 s: 8,000 settings tried for 8 GPUs, best so far PP2 DP32 with 88.0 s a step; " in text
    assert text.count("\n") == (0 if terminal else len(due)) and text.count("\r") == (len(due) if terminal else 0)


SMALL = ["data.prompts_per_step=8", "data.samples_per_prompt=2", "data.mini_batch_prompts=null"]


def test_asynchronous_rows_are_those_of_simulate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suggest_simulated, "SECONDS", 600)
    monkeypatch.setattr(search, "SECONDS", 1)
    arguments = ["--config", "configs/searchr1_30b.yaml", *SMALL]
    assert main([*arguments, "--suggest", "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)["simulated"]
    assert main([*arguments, "--simulate", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    given, first, best, *others = simulated["rows"]
    assert (given["label"], first["label"], best["label"]) == ("0", "1", "full 2") and simulated["note"] is None
    assert given["seconds"] == pytest.approx(compared["modes"][0]["seconds"]) and given["saves"] == 0
    fastest = min(compared["splits"], key=lambda row: row["seconds"])
    assert best["seconds"] == pytest.approx(fastest["seconds"]) and simulated["settings"] == fastest["settings"]
    assert best["saves"] == pytest.approx(1 - best["seconds"] / given["seconds"])
    assert all(best["seconds"] <= row["seconds"] < given["seconds"] for row in others)


def test_settings_that_cannot_be_simulated_have_a_note(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suggest_simulated, "SECONDS", 600)
    monkeypatch.setattr(search, "SECONDS", 1)
    assert main(["--config", "configs/searchr1_30b.yaml", "algorithm.advantage=remax", "--suggest"]) == 0
    out = capsys.readouterr().out
    assert "\nnote: no simulation of asynchronous settings: algorithm.advantage = remax" in out
