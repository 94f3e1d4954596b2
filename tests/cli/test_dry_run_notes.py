"""Notes of a dry run: a suggested change helps, and each note appears in the right cases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyrl_mega.cli import dry_run, dry_run_notes
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import Config
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import fit
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.memory import GIB, policy_memory
from skyrl_mega.planner.moves import residency_time
from skyrl_mega.planner.relief import MIN_FREE, least_safe_phase
from skyrl_mega.planner.shared import shared_gpus

CONFIGS = Path(__file__).parents[2] / "configs"
SHARED = ["cluster.shared=true", "cluster.nodes=4", "cluster.gpu_memory_gib=79.1"]


def noted(config: Config) -> list[str]:
    hf, _ = dry_run.checked(config)
    return dry_run_notes.notes(config, architecture(hf).describe(hf), fit.parallel_of(config)[0])


def left(config: Config, phase: str) -> int:
    hf, _ = dry_run.checked(config)
    gpus = shared_gpus(config, architecture(hf).describe(hf), fit.parallel_of(config)[0])
    return min(gpu.free(phase) for gpu in gpus)


@pytest.mark.parametrize(
    ("given", "phase", "helps", "no_help"),
    [
        (
            ["rollout.memory_fraction=0.85", "policy.recompute=none", "residency.keep=[]", "policy.micro_tokens=12288"],
            "train",
            ["policy.recompute=full", "policy.micro_tokens=", "rollout.eager=true"],
            ["rollout.memory_fraction=", "residency.keep="],
        ),
        (
            ["rollout.memory_fraction=0.45"],
            "train",
            ["residency.keep=[parameters,gradients,optimizer]", "rollout.memory_fraction=0.4"],
            ["policy.recompute=", "rollout.eager"],
        ),
        (
            ["rollout.memory_fraction=0.93", "residency.keep=[]"],
            "generate",
            ["rollout.memory_fraction=0.88"],
            ["policy.", "residency.keep=", "rollout.eager"],
        ),
    ],
    ids=["a cache that sleeps", "everything stays", "a large share"],
)
def test_what_is_said_to_give_room_gives_so_much(
    file: Path, given: list[str], phase: str, helps: list[str], no_help: list[str]
) -> None:
    config = compose(file, [*SHARED, *given])
    (note,) = (note for note in noted(config) if note.startswith(("tight", "close")))
    assert f" in phase {phase}, " in note, note
    offered = re.findall(r"([\w.]+=\S+) \(([\d.]+) GiB\)", note)
    assert offered and [part for part in helps if part not in note] == [], note
    assert [part for part in no_help if part in note] == [], note
    for setting, gained in offered:
        other = compose(file, [*SHARED, *given, setting])
        assert (left(other, phase) - left(config, phase)) / GIB == pytest.approx(float(gained), abs=0.051)


FULL, MOE, SELECTIVE = (f"policy.recompute={kind}" for kind in ("full", "moe", "selective"))
HALF, STREAMED = "policy.offload_layers=24", "policy.optimizer.streamed=true"
LONG = [FULL, MOE, HALF, STREAMED, SELECTIVE]


def test_an_optimizer_that_need_not_be_streamed_is_told_of(file: Path) -> None:
    streamed = "policy.optimizer.streamed=true"
    tight = ["cluster.gpu_memory_gib=79.1", "policy.recompute=none", "policy.micro_tokens=14000", streamed]
    for given, expected in (([streamed, "policy.recompute=full"], 1), (tight, 0)):
        matching = [note for note in noted(compose(file, given)) if note.startswith(f"{streamed} takes 0.")]
        assert len(matching) == expected, given


def test_what_hosts_have_no_memory_for_is_not_offered(file: Path) -> None:
    given = ["rollout.memory_fraction=0.48", "residency.keep=[parameters,optimizer,gradients]"]
    share = "rollout.memory_fraction=0.43"
    for gib, offered in ((2000, ["residency.keep=[]", share]), (200, [share])):
        config = compose(file, [*SHARED, *given, f"cluster.host_memory_gib={gib}"])
        (note,) = (note for note in noted(config) if note.startswith("close"))
        assert re.findall(r"([\w.]+=\S+) \(", note) == offered, note


@pytest.mark.parametrize(
    ("given", "offered"),
    [
        ([], [FULL, MOE, HALF, "policy.micro_tokens=7000", STREAMED, SELECTIVE]),
        # The longest sequence forms a micro-batch alone, however few tokens are set.
        (["rollout.max_response_tokens=12000", "policy.micro_tokens=8192"], LONG),
    ],
    ids=["a full row", "a long sequence"],
)
def test_what_is_said_to_give_a_policy_of_its_own_room_gives_so_much(
    file: Path, given: list[str], offered: list[str]
) -> None:
    common = ["cluster.gpu_memory_gib=79.1", "policy.recompute=none", "policy.micro_tokens=14000", *given]

    def peak(*more: str) -> int:
        config = compose(file, [*common, *more])
        hf, _ = dry_run.checked(config)
        return policy_memory(config, architecture(hf).describe(hf), fit.parallel_of(config)[0], 0).peak

    (note,) = (note for note in noted(compose(file, common)) if note.startswith("tight"))
    assert f" lacks {peak() / GIB - 79.1:.1f} GiB" in note
    gained = dict(re.findall(r"([\w.]+=\S+) \(([\d.]+) GiB\)", note))
    assert [*gained] == offered, note
    for setting, size in gained.items():
        assert (peak() - peak(setting)) / GIB == pytest.approx(float(size), abs=0.051)


def test_less_than_the_margin_is_told_in_any_phase(file: Path) -> None:
    """Tries settings around a GiB of free memory during generation, a phase without computation of the policy."""
    for fraction, expected in ((0.93, True), (0.92, True), (0.91, False), (0.7, False)):
        config = compose(file, [*SHARED, "residency.keep=[]", f"rollout.memory_fraction={fraction}"])
        assert (left(config, "generate") < MIN_FREE) == expected
        assert any(note.startswith("close") for note in noted(config)) == expected


def test_a_phase_that_may_lack_more_comes_before_one_with_less_left(file: Path) -> None:
    given = ["residency.keep=[]", "rollout.memory_fraction=0.92", "policy.recompute=none", "policy.micro_tokens=9600"]
    config = compose(file, [*SHARED, *given])
    hf, _ = dry_run.checked(config)
    short = least_safe_phase(config, architecture(hf).describe(hf), fit.parallel_of(config)[0])
    assert short is not None and short.phase == "train"
    assert left(config, "train") > left(config, "generate") > 0


def test_what_leaves_gpus_that_nothing_shares_is_told_with_its_time(file: Path) -> None:
    """Checks the note on GPUs without sharing: following the note removes the note and the seconds of moving."""

    def moves(*given: str) -> tuple[float, list[str]]:
        config = compose(file, [*given])
        hf, _ = dry_run.checked(config)
        time = residency_time(config, architecture(hf).describe(hf), fit.parallel_of(config)[0])
        return time, [note for note in noted(config) if "for nothing" in note]

    seconds, notes = moves("residency.keep=[]")
    assert len(notes) == 1 and f"{seconds:.2g} s a step; give residency.keep=null" in notes[0] and seconds > 0.5
    assert notes[0].startswith("policy and engines have GPUs of their own, ")
    for keep, who in (
        ("engine_weights,kv_cache", "policy has GPUs of its own"),
        ("parameters,gradients,optimizer", "engines have GPUs of their own"),
        ("engine_weights,kv_cache,parameters,optimizer", "policy has GPUs of its own"),
    ):
        seconds, notes = moves(f"residency.keep=[{keep}]")
        assert len(notes) == 1 and notes[0].startswith(who)
        ending = f" {seconds:.2g} s a step;" if seconds else " it is dropped and made again;"
        assert ending in notes[0] and " 0 s" not in notes[0] and (seconds > 0) == ("parameters" not in keep)
    assert moves() == (0.0, [])
    assert moves(*SHARED, "residency.keep=[]")[1] == []

    critic = [*SHARED, "algorithm=gae", "cluster.nodes=8", "rollout.memory_fraction=0.6"]
    with_critic, notes = moves(*critic, "residency.keep=[optimizer]")
    assert len(notes) == 1 and notes[0].endswith("give residency.keep=[optimizer,critic]")
    without, none = moves(*critic, "residency.keep=[optimizer,critic]")
    assert none == [] and f" {with_critic - without:.2g} s a step" in notes[0] and with_critic - without > 0.5


def test_a_setting_of_the_other_head_is_told_of(file: Path) -> None:
    matching = [
        [note for note in noted(compose(file, ["cluster.gpu_memory_gib=79.1", *given])) if "logit_chunk" in note]
        for given in ([], ["policy.logit_chunk=64"], ["policy.logit_chunk=64", "policy.head=chunked"])
    ]
    assert [len(notes) for notes in matching] == [0, 1, 0]
    assert matching[1][0].startswith("policy.logit_chunk=64 is read on a CPU alone: policy.head=auto has no logits")


SERVED = "rollout.options.quantization=fp8_per_block"
BLACKWELL, HOPPER, OTHERWISE = "needs a Blackwell GPU", "needs a Hopper GPU", "round differently from the policy"
LEFT, SECONDS = (
    "with weights rounded to FP8 by the weight sync",
    "estimates its matrix products at the speed of bfloat16",
)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], set()),
        (["policy.precision.recipe=mxfp8"], {BLACKWELL, OTHERWISE, SECONDS}),
        (["policy.precision.recipe=mxfp8", "cluster.gpu_memory_gib=178"], {OTHERWISE, SECONDS}),
        (["policy.precision.recipe=mxfp8", "cluster.gpu_memory_gib=null"], {OTHERWISE, SECONDS}),
        (["policy.precision.recipe=fp8_blockwise", "cluster.gpu_memory_gib=178", SERVED], {HOPPER, SECONDS}),
        (["policy.precision.recipe=fp8_blockwise", "weights.wire=fp8", SERVED], {SECONDS}),
        (["weights.wire=fp8"], {LEFT}),
        (["policy.precision.recipe=fp8_current", "weights.wire=fp8"], {OTHERWISE, LEFT, SECONDS}),
        (["rollout.options.kv_cache_dtype=fp8"], set()),
    ],
)
def test_what_one_should_know_of_fp8_is_told(file: Path, given: list[str], told: set[str]) -> None:
    notes = noted(compose(file, ["cluster.gpu_memory_gib=79.1", *given]))
    assert {
        text for text in (BLACKWELL, HOPPER, OTHERWISE, LEFT, SECONDS) if any(text in note for note in notes)
    } == told


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["policy.recompute=selective", "policy.offload_layers=1000"],
            "policy.offload_layers=1000 is all of a rank's layers, 48 at most",
        ),
        (["policy.recompute=selective", "policy.offload_layers=48"], None),
        (
            ["rollout.tensor=4", "rollout.options.data_parallel_size=4", "rollout.engines=1"],
            "data_parallel_size=4 works only in a plan: in a run",
        ),
    ],
)
def test_what_does_less_than_it_says(file: Path, given: list[str], said: str | None) -> None:
    notes = noted(compose(file, [*SHARED, "residency.keep=[]", *given]))
    about = [note for note in notes if "offload_layers" in note or "data_parallel_size" in note]
    assert (said is None and not about) or (len(about) == 1 and said is not None and said in about[0])


def test_more_staleness_than_can_be_simulated(file: Path) -> None:
    ahead = ["cluster.shared=false", "policy.ranks=16", "cluster.nodes=4", "rollout.engines=2", "asynchrony.mode=full"]
    ahead += ["algorithm.importance_cap=2", "residency.keep=null"]
    for most in (16, 17):
        notes = noted(compose(file, [*ahead, f"asynchrony.max_staleness={most}"]))
        assert any("--simulate compares values up to 16" in note for note in notes) is (most == 17)


def test_processes_that_a_loopback_service_keeps_on_one_node(file: Path) -> None:
    def said(*given: str) -> list[str]:
        config = compose(file, [*SHARED, "residency.keep=[]", "environment.processes=16", *given])
        return [note for note in noted(config) if note.startswith("environment.retriever")]

    assert said() == []
    (note,) = said("environment.retriever.url=http://127.0.0.1:8000")
    assert "retriever.url = http://127.0.0.1:8000" in note and "all 16 of environment.processes" in note
    assert said("environment.retriever.url=http://10.0.0.5:8000") == []
    local, absent = said("environment.retriever.index=data/none")
    assert "retriever.index = data/none: this service" in local and "is not here and was not checked" in absent
    assert len(said("environment.retriever.index=data/none", "environment.retriever.build=--corpus x")) == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["rollout.tensor=8", "rollout.engines=2"], "96 columns"),
        (["rollout.tensor=4", "rollout.engines=4"], "192 columns"),
        (["rollout.tensor=2", "rollout.engines=8"], None),
        (["rollout.tensor=8", "rollout.engines=2", "rollout.options.enable_expert_parallel=true"], None),
        (["rollout.tensor=8", "rollout.engines=2", "weights.wire=auto", "policy.precision.recipe=model"], None),
    ],
)
def test_blocks_that_begin_elsewhere_in_an_engine_are_told_of(given: list[str], told: str | None) -> None:
    """Checks FP8 blocks of an engine: vLLM quantises a worker's shard, 96 of an expert's 768 columns."""
    fp8 = ["policy.precision.recipe=fp8_blockwise", "weights.wire=fp8", "rollout.options.quantization=fp8_per_block"]
    notes = noted(compose(CONFIGS / "dapo.yaml", [*fp8, *given]))
    matching = [note for note in notes if "begin at a worker's own columns" in note]
    assert [f"leaves {told} of an expert" in note for note in matching] == ([True] if told else [])
    better = "with rollout.tensor=1, 2 or rollout.options.enable_expert_parallel=true with rollout.tensor="
    assert all(better in note for note in matching), "3 and 6 do not divide the heads"


@pytest.mark.parametrize(
    ("config", "given", "said"),
    [
        ("dapo", [], ""),
        ("searchr1_30b", [], ""),
        (
            "dapo",
            ["rollout.max_response_tokens=30720", "model.max_length=32768"],
            "rollout.sampling.max_tokens=8,192 ends an answer before rollout.max_response_tokens=30,720",
        ),
        (
            "searchr1_30b",
            ["rollout.max_response_tokens=30720"],
            "rollout.max_length=4,596 ends a sequence, prompt and answers, before rollout.max_response_tokens=30,720",
        ),
    ],
)
def test_a_limit_that_another_comes_before_is_told_of(config: str, given: list[str], said: str) -> None:
    composed = compose(Path(f"configs/{config}.yaml"), given)
    matching = [note for note in noted(composed) if " ends a" in note]
    assert [note.startswith(said) for note in matching] == [True] * bool(said)
    planned, usual = (batch(c, ParallelDims(16)) for c in (composed, compose(Path(f"configs/{config}.yaml"), [])))
    assert (planned.mean, planned.generated) == (usual.mean, usual.generated), "what ends first sets the seconds"
