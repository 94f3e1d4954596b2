"""`--simulate`: the tables, the advice, and the errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.cli import simulate, simulate_choices, simulate_text
from skyrl_mega.cli.dry_run import checked
from skyrl_mega.cli.refusal import find_error
from skyrl_mega.cli.simulate_choices import MODES, TENSORS, Choice, Refused
from skyrl_mega.cli.simulate_text import Comparison, SimulatedRow
from skyrl_mega.cli.train import main
from skyrl_mega.config.compose import compose
from skyrl_mega.config.derived import gpus_needed
from skyrl_mega.config.schema import Config
from skyrl_mega.planner.candidates import Change, changed
from skyrl_mega.simulation.simulate import Outcome
from skyrl_mega.simulation.workload import Length

FILE = "configs/searchr1_30b.yaml"
SMALL = ["data.prompts_per_step=8", "data.samples_per_prompt=2", "data.mini_batch_prompts=null"]
SEARCH = ["--config", FILE, *SMALL]
REFERENCE = ["algorithm.kl.coefficient=0.01", "reference.layout={tensor: 2}"]


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*SEARCH, "--simulate", "--json", *arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_a_note_says_that_dynamic_sampling_is_not_simulated() -> None:
    config = compose(FILE, SMALL)
    assert simulate_text.dynamic_sampling_notes(config) == []
    config.algorithm.dynamic_sampling.enabled = True
    [note] = simulate_text.dynamic_sampling_notes(config)
    assert note.startswith("algorithm.dynamic_sampling.enabled=true is not simulated") and "dry run" in note


def test_what_is_advised_passes_the_checks_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    result = simulated(capsys, "--turns", "2", "--environment", "30,1")
    modes = [(row["mode"], row["max_staleness"], row["shared"]) for row in result["modes"]]
    assert modes == [("off", 0, True), *((*mode, False) for mode in MODES)] and not result["refused"]
    best = min(result["splits"], key=lambda row: row["seconds"])
    left = best["rollout.engines"] * best["rollout.tensor"]
    assert {row["rollout.tensor"] for row in result["engines"]} == {size for size in TENSORS if left % size == 0}
    recut = [(row["rollout.engines"], row["rollout.tensor"], row["mode"], row["shared"]) for row in result["shared"]]
    assert recut and {(n * t, mode, shared) for n, t, mode, shared in recut} == {(32, "off", True)}
    assert all(row["rollout.memory_fraction"] in (0.6, 0.9) for row in result["engines"])
    gpus = {row["rollout.tensor"] * row["rollout.engines"] for row in [*result["engines"], best]}
    assert len(gpus) == 1, "no GPU is idle"
    fastest = min([*result["engines"], best], key=lambda row: row["seconds"])
    taken = {(row["rollout.tensor"], row["rollout.memory_fraction"]) for row in result["modes"][1:]}
    [chosen] = [
        row for row in [best, *result["engines"]] if (row["rollout.tensor"], row["rollout.memory_fraction"]) in taken
    ]
    assert chosen["seconds"] <= 1.02 * fastest["seconds"]
    assert {row["policy.ranks"] for row in result["modes"][1:]} == {best["policy.ranks"]}
    hf, _ = checked(compose(FILE, SMALL))
    asynchronous = result["modes"][2:]
    assert all("algorithm.importance_cap=2" in row["settings"] for row in asynchronous)
    advised = next(
        row
        for row in [*asynchronous, *result["splits"], *result["engines"], *result["shared"]]
        if row["settings"] == result["advice"]
    )
    for row in (advised, *result["modes"][:2]):
        config = compose(FILE, [*SMALL, *row["settings"].split()])
        assert find_error(config, hf, planned=True, strict=not config.cluster.shared) is None
        assert config.asynchrony.mode == row["mode"] and config.policy.ranks in (None, row["policy.ranks"])


def test_each_simulation_has_its_number() -> None:
    config = compose(FILE, SMALL)
    simulator = simulate.Simulator({}, None)  # type: ignore[arg-type]
    simulator.expect(2)
    lines = [simulator.progress(Choice("off", 0, config, ())) for _ in range(3)]
    assert [line.partition(": ")[0] for line in lines] == [f"simulate {n} of about {max(n, 2)}" for n in (1, 2, 3)]
    simulator.expect(4)
    assert simulator.progress(Choice("full", 2, config, ())).startswith("simulate 4 of about 7: mode=full")


def test_modes_that_cannot_run_are_listed_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    result = simulated(capsys, "algorithm.dynamic_sampling.enabled=true", "algorithm.dynamic_sampling.mode=replace")
    assert [(row["mode"], row["max_staleness"]) for row in result["modes"][1:]] == [("off", 0), ("one_step", 1)]
    assert [(row["mode"], row["max_staleness"]) for row in result["refused"]] == [("full", 1), ("full", 2), ("full", 4)]
    assert all("algorithm.dynamic_sampling.mode = replace" in row["reason"] for row in result["refused"])
    assert {row["mode"] for row in result["splits"]} == {"one_step"}, "of those that can run"


def test_settings_with_asynchrony_are_played_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    apart = ["cluster.shared=false", "residency.keep=null", "policy.ranks=16", "rollout.engines=2"]
    given = ["asynchrony.mode=full", "asynchrony.max_staleness=3", "algorithm.importance_cap=2"]
    result = simulated(capsys, *apart, *given)
    first, second, *others = result["modes"]
    assert (first["mode"], second["mode"], second["max_staleness"]) == ("off", "full", 3)
    assert second["settings"] == "" and second["policy.ranks"] == 16
    rows = [(row["settings"], row["mode"], row["max_staleness"]) for row in result["modes"]]
    assert len(set(rows)) == len(rows), "none is there twice"
    assert {(row["mode"], row["max_staleness"]) for row in others} | {("off", 0)} == {*MODES}
    [too_stale] = simulated(capsys, *apart, *given, "asynchrony.max_staleness=500")["refused"]
    assert "--simulate plays 16 at most" in too_stale["reason"]
    refused = simulated(capsys, *given)["refused"]
    assert [each["reason"].startswith("(the settings as they are) asynchrony.mode = full") for each in refused] == [
        True
    ]


def test_of_engines_that_differ_by_chance_those_with_fewest_changes_are_taken() -> None:
    c = compared(100, 80, 79, 70)
    more = (*c.rows[1].choice.change, ("rollout.memory_fraction", 0.9), ("rollout.tensor", 4))
    given, bigger, fastest = c.rows[1:]
    other = replace(bigger, choice=replace(bigger.choice, change=more))
    assert simulate._nearly_best([other, given]) is given
    assert simulate._nearly_best([other, given, fastest]) is fastest


def test_the_fastest_engines_are_tried_with_the_memory_of_the_settings() -> None:
    config = compose(FILE, SMALL)
    split = (("policy.ranks", 16), ("rollout.engines", 4), ("rollout.tensor", 4), ("rollout.memory_fraction", 0.9))
    [plain] = simulate_choices.with_given_fraction(config, split, [split])
    assert changed(config, plain).rollout == replace(changed(config, split).rollout, memory_fraction=0.6)
    assert simulate_choices.with_given_fraction(config, split, [split, plain]) == []
    assert simulate_choices.with_given_fraction(config, plain, [plain]) == []


def test_a_correction_of_ones_own_is_left() -> None:
    config = compose(FILE, [*SMALL, "algorithm.old_logprobs=engine"])
    hf, _ = checked(config)
    split = simulate_choices.splits(config, hf)[0]
    choice = simulate_choices.choice(config, split, "full", 4, hf)
    assert isinstance(choice, Choice) and dict(choice.change)["asynchrony.max_staleness"] == 4
    assert not any(key.startswith("algorithm.") for key, _ in choice.change)


@pytest.mark.parametrize(
    ("more", "ranks", "engines"),
    [
        ([], (8, 24), (12, 4)),
        (["cluster.nodes=8"], (8, 56), (28, 4)),
        ([*REFERENCE, "cluster.nodes=8"], (8, 24), (24, 8)),
        ([*REFERENCE, "reference.ranks=8"], (8, 16), (8, 4)),
        (["algorithm.advantage=gae", "critic.ranks=8"], (8, 16), (8, 4)),
    ],
)  # fmt: skip
def test_splits_leave_gpus_for_reference_and_critic(
    more: list[str], ranks: tuple[int, int], engines: tuple[int, int]
) -> None:
    config = compose(FILE, [*SMALL, "rollout.tensor=2", *more])
    hf, _ = checked(compose(FILE, SMALL))
    splits = [dict(split) for split in simulate_choices.splits(config, hf)]
    assert 2 <= len(splits) <= simulate_choices.SPLITS
    for split in splits:
        assert gpus_needed(changed(config, tuple(split.items()))) <= 8 * config.cluster.nodes
    ends = splits[0], splits[-1]
    assert tuple(split["policy.ranks"] for split in ends) == ranks
    assert tuple(split["rollout.engines"] for split in ends) == engines


def test_where_the_given_engines_leave_the_policy_no_gpu_others_are_tried() -> None:
    config = compose("configs/dapo_1.7b.yaml", ["rollout.engines=1", "rollout.tensor=8"])
    hf, _ = checked(config)
    splits = [dict(split) for split in simulate_choices.splits(config, hf)]
    assert splits and all(split["rollout.tensor"] < 8 for split in splits)


def test_other_engines_keep_the_blocks_of_fp8() -> None:
    """Checks engine sizes for experts of 768 columns: three blocks of 128 per worker of two, one and a half of four."""
    options = "rollout.options={quantization: fp8_per_block}"
    for wire, expected in (("fp8", {2}), ("auto", {2, 4, 8})):
        config = compose(FILE, [*SMALL, "rollout.tensor=2", f"weights.wire={wire}", options])
        hf, _ = checked(config)
        split = simulate_choices.splits(config, hf)[0]
        tensor_sizes = {dict(each)["rollout.tensor"] for each in simulate_choices.engines(config, split, hf)}
        assert tensor_sizes - {1} == expected


def compared(*seconds: float, refused: tuple[Refused, ...] = ()) -> Comparison:
    """Returns a comparison of the given settings and other settings, with steps of these seconds."""
    config = compose(FILE)
    apart = (("cluster.shared", False), ("residency.keep", None), ("policy.ranks", 16), ("rollout.engines", 2))
    outcome = Outcome(0.0, 0.5, 0.5, 0.5, 0.0, 0.0, calls_filled=0.5)
    rows = [SimulatedRow(simulate_choices.synchronous(config), replace(outcome, seconds=seconds[0]))]
    rows += [
        SimulatedRow(Choice("off", 0, changed(config, apart), apart), replace(outcome, seconds=s)) for s in seconds[1:]
    ]
    length = Length(100, 800, 3)
    return Comparison(config, rows, rows[1:], [], [], refused, environment_s=0.0, length=length)


def test_where_nothing_is_faster_that_is_said() -> None:
    for slower in (compared(100, 101), compared(100, 99.9)):
        assert "nothing here is faster than asynchrony.mode=off on shared GPUs" in simulate_text.text(slower)
        assert simulate_text.values(slower)["advice"] is None
    report_text = simulate_text.text(compared(100, 120, 80))
    assert "nothing here" not in report_text
    assert "1.25 times as fast as with asynchrony.mode=off on shared GPUs; add\n  cluster.shared=false" in report_text
    assert "advised: mode=off, 16 ranks, 2 × TP8 with 0.6 of the memory: 80.0 s, a step is" in report_text
    marked = [line.split()[1:5] for line in simulate_text.text(compared(100, 80)).splitlines() if line[:4] == "  * "]
    assert marked == [["off", "0", "16", "ranks"]]


def test_of_rows_that_differ_by_chance_the_least_stale_is_advised() -> None:
    for fastest, advised in ((79, 0), (70, 2)):
        c = compared(100, 80, fastest)
        stale = replace(c.rows[2], choice=replace(c.rows[2].choice, mode="full", most=2))
        best = replace(c, rows=[*c.rows[:2], stale], splits=[stale]).best
        assert best is not None and best.choice.most == advised


def test_other_engines_are_among_what_is_advised() -> None:
    c = compared(100, 80)
    more = (*c.rows[1].choice.change, ("rollout.memory_fraction", 0.9))
    sized = replace(c.rows[1], choice=Choice("off", 0, changed(c.config, more), more))
    for seconds, advised in ((79, c.rows[1]), (70, sized)):
        sized = replace(sized, outcome=replace(sized.outcome, seconds=seconds))
        comparison = replace(c, engine_sizes=[sized])
        assert comparison.best is not None and comparison.best.choice == advised.choice
        table = simulate_text.text(comparison).partition("engines, on the GPUs that the best split leaves them:")[2]
        assert f"0.9      {seconds}.0 " in table


def asynchronous(c: Comparison, number: int) -> Comparison:
    """Returns the comparison with row `number` as the given settings, with asynchrony."""
    row = c.rows[number]
    config = changed(row.choice.config, (("asynchrony.mode", "full"), ("asynchrony.max_staleness", 3)))
    rows = [replace(each, choice=Choice("full", 3, config, ())) if each is row else each for each in c.rows]
    rows[0] = replace(rows[0], choice=replace(rows[0].choice, change=(("asynchrony.mode", "off"),)))
    return replace(c, config=config, rows=rows, splits=[each for each in c.splits if each is not row])


def test_other_engines_on_shared_gpus_may_be_what_is_advised() -> None:
    c = compared(100, 80)
    other = (("rollout.tensor", 4), ("rollout.engines", 8))
    recut = replace(c.rows[0], choice=Choice("off", 0, changed(c.config, other), other))
    recut = replace(recut, outcome=replace(recut.outcome, seconds=70.0))
    report_text = simulate_text.text(replace(c, shared_engines=[recut]))
    assert "advised: mode=off, 32 ranks, shared, 8 × TP4 with 0.6 of the memory: 70.0 s" in report_text
    assert "add\n  rollout.tensor=4 rollout.engines=8\n" in report_text


def test_asynchronous_settings_are_what_a_gain_is_told_of() -> None:
    c = asynchronous(compared(100, 80, 60), 1)
    assert "60.0 s, a step is 1.33 times as fast as with the settings as they are; add" in simulate_text.text(c)


def test_asynchronous_settings_that_are_slower_than_none_are_given_up() -> None:
    c = asynchronous(compared(60, 80, 90), 1)
    report_text = simulate_text.text(c)
    assert "advised: mode=off" in report_text and report_text.count("  *  off") == 1
    assert "a step is 1.33 times as fast as with the settings as they are; add\n  asynchrony.mode=off\n" in report_text
    assert simulate_text.values(c)["advice"] == "asynchrony.mode=off"


def test_what_was_played_and_what_holds_it_up_is_said() -> None:
    c = compared(100, 80)
    report_text = simulate_text.text(c)
    assert "a trajectory has 3.0 turns, 800 tokens that are written, 100 that are read" in report_text
    assert "environment.slots" not in report_text
    report_text = simulate_text.text(replace(c, config=changed(c.config, (("environment.slots", 64),))))
    assert "environment.slots = 64: at most so many of up to 2,560 trajectories run at once" in report_text


def bound(c: Comparison, *filled: float, **environment: int) -> Comparison:
    """Returns rows whose environment calls fill these shares of a step."""
    given = tuple((f"environment.{key}", value) for key, value in environment.items())
    pairs = zip(c.rows, filled, strict=True)
    rows = [replace(row, outcome=replace(row.outcome, calls_filled=share)) for row, share in pairs]
    return replace(c, rows=rows, splits=rows[1:], environment_s=9.5, config=changed(c.config, given))


def test_where_environments_decide_every_row_no_layout_is_advised() -> None:
    report_text = simulate_text.text(bound(compared(100, 96), 0.93, 0.95, workers=16))
    assert "no layout is advised: the environments decide how long a step takes, in every row" in report_text
    assert "\nadvised: " not in report_text and "  * " not in report_text
    assert "environment.workers = 16: calls of environments alone take 91.2 s of a step, so many at once" in report_text
    assert "of 9.5 s a trajectory; give more, if what they call can take it, or make them shorter" in report_text
    assert simulate_text.values(bound(compared(100, 96), 0.93, 0.95))["advice"] is None
    report_text = simulate_text.text(bound(compared(100, 96), 0.93, 0.95, workers=16, slots=8))
    assert "environment.slots = 8: calls of environments alone take 91.2 s" in report_text
    report_text = simulate_text.text(bound(compared(100, 80), 0.7, 0.95, workers=16))
    assert (
        "advised: mode=off" in report_text
        and "environment.workers = 16: calls of environments alone take 70.0 s" in report_text
    )
    assert "alone take" not in simulate_text.text(bound(compared(100, 80), 0.5, 0.6))


@pytest.mark.parametrize("seconds", [(100, 80, 90), (100, 80, 79), (80, 80, 90), (100, 80, 80)])
def test_settings_that_are_the_fastest_but_for_chance_are_left(seconds: tuple[float, ...]) -> None:
    c = asynchronous(compared(*seconds), 1)
    assert c.best is c.rows[1]
    gain = f"{seconds[0] / 80:.2f}"
    assert f"nothing here is faster than the settings: a step is {gain} times as fast" in simulate_text.text(c)
    assert simulate_text.values(c)["advice"] is None


def test_what_takes_turns_is_not_told_as_idle() -> None:
    c = compared(100, 80)
    shared, separate = simulate_text.values(c)["modes"]
    assert (shared["policy_waits"], shared["engines_idle"]) == (None, None)
    assert (separate["policy_waits"], separate["engines_idle"]) == (0.5, 0.5)
    [of_shared] = [line for line in simulate_text.text(c).splitlines() if "ranks, shared" in line]
    assert of_shared.split()[-4:-2] == ["–", "–"]


def test_where_the_memory_of_gpus_of_their_own_does_not_fit_the_given_share_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = compose("configs/dapo_1.7b.yaml", ["rollout.engines=1", "rollout.tensor=8", "rollout.memory_fraction=0.6"])
    hf, _ = checked(config)
    real = simulate_choices.choice

    def small(config: Config, split: Change, *rest: Any) -> Any:
        large = dict(split).get("rollout.memory_fraction") == 0.9
        return Refused("off", 0, "it does not fit") if large else real(config, split, *rest)

    monkeypatch.setattr(simulate_choices, "choice", small)
    splits = simulate_choices.splits(config, hf)
    assert splits and {dict(split)["rollout.memory_fraction"] for split in splits} == {0.6}


def test_how_far_figures_may_be_trusted_is_said() -> None:
    report_text = simulate_text.text(compared(100, 80, refused=(Refused("full", 2, "it may not"),)))
    assert (
        "4 steps or more with one seed" in report_text
        and "510 of them stand for 2560, and its tail is theirs" in report_text
    )
    assert "mode=full and max_staleness=2 cannot run here: it may not" in report_text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*SEARCH, "--tokens", "5,1"], "--tokens: it has an effect only with --simulate or --dry-run"),
        ([*SEARCH, "--simulate", "--tokens", "0"], "with a MEAN of 1 to 4596 (rollout.max_response_tokens) and a"),
        ([*SEARCH, "--simulate", "--environment", "61"], "--environment 61: allowed is MEAN,SIGMA with a MEAN of 0"),
        ([*SEARCH, "--simulate", "--turns", "0"], "--turns 0: allowed"),
        ([*SEARCH, "--simulate", "--turns", "inf"], "--turns inf: allowed"),
        ([*SEARCH, "--simulate", "--turns", "5"], "--turns 5: allowed is at most rollout.max_turns = 4"),
        ([*SEARCH, "--simulate", "--like", ""], "--like '': allowed is the folder of a run"),
        ([*SEARCH, "--simulate", "--like", "nowhere"], "--like nowhere: there are no trajectories"),
        ([*SEARCH, "--simulate", "--like", "nowhere", "--turns", "2"], "--turns: --like takes tokens, environment"),
        ([*SEARCH, "--simulate", "--dry-run"], "--simulate --dry-run: give one of them"),
        ([*SEARCH, "--simulate", "--suggest"], "--simulate --suggest: give one of them"),
        ([*SEARCH, "--simulate", "--settings"], "--simulate --settings: give one of them"),
        ([*SEARCH, "--simulate", "algorithm.advantage=remax"], "algorithm.advantage = remax: --simulate does not play"),
        ([*SEARCH, "--simulate", "asynchrony.max_staleness=-1"], "max_staleness = -1: allowed is a whole number of at"),
        (["--config", "configs/quickstart.yaml", "--simulate"], "cluster.device = cpu"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_mega.cli.dry_run.checked", lambda config: ({}, []))  # seconds, for the earlier messages
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and error.count("\n") == 0


def test_a_broken_file_of_a_run_is_told_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "step_000001.parquet").write_bytes(b"not parquet")
    assert main([*SEARCH, "--simulate", "--like", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip()
    assert "the trajectories in step_000001.parquet cannot be read" in error and error.count("\n") == 0


def test_a_node_of_eight_is_split_with_fewer_ranks_for_experts_and_a_streamed_optimizer() -> None:
    """Splits a node of eight; the file spreads the experts over all 8 ranks."""
    given = [
        "cluster.nodes=1",
        "policy.ranks=8",
        "rollout.engines=2",
        "rollout.tensor=4",
        "rollout.memory_fraction=0.9",
    ]
    config = compose("configs/searchr1_30b.yaml", given)
    hf, _ = checked(config)
    split_settings = [dict(split) for split in simulate_choices.splits(config, hf)]
    assert split_settings and all(
        split["policy.layout.expert"] < 8 and split["policy.optimizer.streamed"] for split in split_settings
    )
    assert all(gpus_needed(changed(config, tuple(split.items()))) <= 8 for split in split_settings)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["cluster.gpus_per_node=1", "policy.ranks=1", "rollout.engines=1"], "an engine leaves policy, reference and"),
        (
            ["cluster.gpu_memory_gib=48.2", "rollout.memory_fraction=0.5", "residency.keep=[]"],
            "with policy.ranks=4 and rollout.engines=4 policy: rank 0 needs about",
        ),
    ],
)
def test_where_no_split_fits_the_given_gpus_are_simulated_and_the_reason_is_named(
    capsys: pytest.CaptureFixture[str], given: list[str], why: str
) -> None:
    common = [*SMALL, "rollout.tensor=1", "policy.layout.tensor=1", "cluster.host_memory_gib=null"]
    assert main(["--config", "configs/searchr1_3b.yaml", "--simulate", *common, *given]) == 0
    report_text = capsys.readouterr().out
    assert f"policy and engines: impossible, as none fits:\n  {why}" in report_text, report_text
    assert "; give more nodes (cluster.nodes), or see what --suggest finds\n" in report_text
    assert "nothing here is faster" in report_text or "advised: mode=off" in report_text


def test_a_critic_and_a_policy_that_fill_all_gpus_are_simulated_on_shared_gpus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["data.prompts_per_step=2", "data.mini_batch_prompts=null", "data.samples_per_prompt=2"]
    arguments = ["--config", "configs/swe_14b.yaml", *small, "--turns", "2", "--simulate", "--json"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    [given] = result["modes"]
    assert (given["mode"], given["shared"], given["settings"]) == ("off", True, "")
    assert {row["shared"] for row in result["shared"]} == {True} and not result["splits"] and not result["engines"]
    assert [(row["mode"], row["max_staleness"]) for row in result["refused"]] == [*MODES[1:]]
    assert all("impossible" in row["reason"] for row in result["refused"])
    assert result["no_split"].startswith("an engine leaves policy, reference and critic no GPUs")
