"""Weight files: any layout reads any, in full and as changes, bit for bit; nothing half-written is ever used."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.cli.weights import main
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check_values
from skyrl_mega.config.compose import compose
from skyrl_mega.config.refusals import raise_first
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.hf_checkpoint.versions import VersionDirectories
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.files import coding, store
from skyrl_mega.weights.files.collect import collect
from skyrl_mega.weights.files.download import Download
from skyrl_mega.weights.files.image import Incomplete
from skyrl_mega.weights.files.manifest import DamagedFiles
from skyrl_mega.weights.files.source import Source
from skyrl_mega.weights.files.store import Absent, FolderStore, StoreError, open_store
from skyrl_mega.weights.plan.sync_plan import copy_bytes
from tests.support.weight_files import Policy, Worker, random_weights, step, workers

HF = hf_config(BuildConfig(architecture="qwen3_moe", hidden=64, experts=4, layers=2))
LAYOUTS = [
    ParallelDims(ranks=1),
    ParallelDims(ranks=4, pipeline=2, expert=2),
    ParallelDims(ranks=4, tensor=2, expert=2, expert_tensor=2),
    ParallelDims(ranks=4, pipeline=2, virtual_pipeline=1, tensor=2, expert=2, expert_tensor=1),
]
ENGINES = [(1, False), (2, False), (2, True)]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PAUSE_S", 0.001)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def policy_of(tmp_path: Path, parallel: ParallelDims = LAYOUTS[1], **more: Any) -> Policy:
    options: dict[str, Any] = {"dtype": "float32", "folder": str(tmp_path / "store"), "plans": tmp_path / "plans"}
    return Policy(HF, parallel, **options | more)


# ---- the stored form -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    itemsize=st.sampled_from([1, 2, 4]),
    count=st.integers(1, 3000),
    share=st.sampled_from([0.0, 0.001, 0.1, 0.29, 0.31, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_bits_come_back_from_every_form(itemsize: int, count: int, share: float, seed: int) -> None:
    """Includes patterns of NaN and infinities: the words are random bits."""
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, count * itemsize, np.uint8)
    new = np.where(np.repeat(random.random(count) < share, itemsize), random.integers(0, 256, len(old), np.uint8), old)
    for base in (None, old):
        stored = coding.encode(new, base, itemsize)
        words = coding.decode(stored.form, memoryview(stored.payload), len(new), itemsize)
        if stored.form in coding.RELATIVE:
            words = words + coding.as_words(old, itemsize)
        assert (words.view(np.uint8) == new).all()
    assert stored.changed == (coding.as_words(new, itemsize) != coding.as_words(old, itemsize)).sum()


@pytest.mark.parametrize("form", range(5))
@pytest.mark.parametrize("payload", [b"", b"\0" * 3, b"\xff" * 40, b"\0" * 24 + b"\xff" * 16])
def test_a_wrong_payload_is_refused_or_decodes_to_the_right_size(form: int, payload: bytes) -> None:
    try:
        words = coding.decode(form, memoryview(payload), 64, 4)
    except coding.WrongPayload:
        return
    assert len(words) == 16


def test_few_changes_of_a_bfloat16_tensor_take_few_bytes(generator: torch.Generator) -> None:
    """Moves each weight by about a millionth, as a step of reinforcement learning does: 2 % change."""
    old = 0.02 * torch.randn(1 << 20, generator=generator)
    new = old + 1e-6 * (2 * torch.rand(old.shape, generator=generator) - 1)
    before, after = (tensor.bfloat16().view(torch.uint8).numpy() for tensor in (old, new))
    stored = coding.encode(after, before, 2)
    assert 0.01 < stored.changed / len(old) < 0.04
    assert len(stored.payload) < 0.02 * len(after)


# ---- any layout reads any ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parallel", LAYOUTS)
def test_engines_of_any_layout_have_the_policys_bits(
    tmp_path: Path, generator: torch.Generator, parallel: ParallelDims, dtype: str
) -> None:
    policy, weights = policy_of(tmp_path, parallel, dtype=dtype), random_weights(HF, generator)
    engines = [worker for kind in ENGINES for worker in workers(HF, *kind, dtype=dtype)]
    for number in range(4):
        name = policy.publish(weights, full=number == 3)
        for place, worker in enumerate(engines):
            if number == 1 and place % 2:
                continue  # this worker reads two publications next time
            report = worker.fetch(policy.folder, name)
            assert worker.has(weights)
            assert report.full == (number in (0, 3))
            assert report.publications == (2 if number == 2 and place % 2 else 1)
        step(weights, 0.02, generator)
    assert worker.fetch(policy.folder, name).publications == 0  # already there


def test_no_box_is_written_twice_and_an_engine_reads_only_its_shard(tmp_path: Path, generator: torch.Generator) -> None:
    """Two data-parallel copies of the policy: every box has one owner, and both copies own some."""
    policy = policy_of(tmp_path, ParallelDims(ranks=4, tensor=2, expert=2))
    boxes = [(chunk.tensor, chunk.box) for rank in policy.ranks for chunk in rank.chunks]
    assert len(boxes) == len(set(boxes))
    assert sum(box.numel for _, box in boxes) == sum(
        int(np.prod(shape)) for shape in architecture(HF).tensors(HF).values()
    )
    assert all(rank.chunks for rank in policy.ranks)
    name = policy.publish(random_weights(HF, generator))
    for worker in workers(HF, 1):
        assert worker.fetch(policy.folder, name).read == sum(report.file.begin - 8 for report in policy.reports)


def test_a_policy_in_another_layout_begins_with_a_full_image_that_readers_complete(
    tmp_path: Path, generator: torch.Generator
) -> None:
    """Resumes in another layout: the new publisher has no base, and a reader of the old one follows."""
    weights = random_weights(HF, generator)
    first = policy_of(tmp_path, LAYOUTS[1])
    (worker,) = workers(HF, 1)
    worker.fetch(first.folder, first.publish(weights))
    step(weights, 0.02, generator)
    second = policy_of(tmp_path, LAYOUTS[2])
    report = worker.fetch(second.folder, second.publish(weights))
    assert report.full and worker.has(weights)
    step(weights, 0.02, generator)
    assert not worker.fetch(second.folder, second.publish(weights)).full and worker.has(weights)


def test_fp8_files_bring_the_policys_numbers_and_scales(tmp_path: Path, generator: torch.Generator) -> None:
    hf = {**hf_config(BuildConfig(architecture="qwen3_moe", hidden=256, experts=2, layers=1)), "head_dim": 128}
    policy = Policy(hf, ParallelDims(ranks=1), "bfloat16", str(tmp_path / "store"), tmp_path / "plans", wire="fp8")
    weights = random_weights(hf, generator)
    (worker,) = workers(hf, 1, dtype="bfloat16")
    (expected,) = workers(hf, 1, dtype="bfloat16")
    for _ in range(2):
        worker.fetch(policy.folder, policy.publish(weights))
        installed, image = worker.installed(), worker.reader.image
        assert image is not None and torch.float8_e4m3fn in image.types.values()
        for piece in expected.shard.pieces:
            if piece.param == "model.layers.0.self_attn.o_proj.weight":
                original = weights[piece.tensor].bfloat16().float()
                difference = (installed[piece.param].float() - original).abs().max()
                assert 0 < difference <= original.abs().max() / 16  # half a step of a mantissa of 3 bits
        step(weights, 0.02, generator)


def test_an_object_store_serves_like_a_folder(tmp_path: Path, generator: torch.Generator) -> None:
    policy, weights = policy_of(tmp_path, folder="memory://weights/run"), random_weights(HF, generator)
    (worker,) = workers(HF, 1)
    for _ in range(3):
        worker.fetch(policy.folder, policy.publish(weights))
        assert worker.has(weights)
        step(weights, 0.02, generator)
    opened = open_store(policy.folder)
    assert collect(opened, policy.name, 2) == 2 * 5
    assert len(opened.list_keys()) == 4 + 5


def test_an_object_whose_upload_fails_is_not_there() -> None:
    opened = open_store("memory://weights/partial")

    def write(error: BaseException) -> None:
        with opened.writing("a/b") as file:
            file.write(b"half")
            raise error

    with pytest.raises(StoreError, match="disk full"):
        write(OSError("disk full"))
    with pytest.raises(KeyboardInterrupt):
        write(KeyboardInterrupt())
    assert opened.list_keys() == []


def test_a_download_that_is_replaced_at_once_reads_nothing(tmp_path: Path, generator: torch.Generator) -> None:
    policy, weights = policy_of(tmp_path), random_weights(HF, generator)
    first, (shard,) = policy.publish(weights), architecture(HF).engine_layout(HF, 1, 1).shards
    second = policy.publish(weights, full=True)
    fetches: list[Any] = []
    download, release = Download(shard, architecture(HF).tensors(HF), 0), threading.Event()
    download._thread.submit(release.wait)
    for name in (first, second):
        download.start(Source(policy.folder, name, 60.0))
        fetches.append(download._running)
    release.set()
    with pytest.raises(StoreError, match="another fetch began"):
        fetches[0].result(60)
    assert fetches[1].result(60).publications == 1


# ---- what goes wrong -----------------------------------------------------------------------------------------------


def test_a_writer_that_dies_before_the_manifest_has_published_nothing(
    tmp_path: Path, generator: torch.Generator
) -> None:
    policy, weights = policy_of(tmp_path), random_weights(HF, generator)
    (worker,) = workers(HF, 1)
    worker.fetch(policy.folder, policy.publish(weights))
    before = {name: tensor.clone() for name, tensor in weights.items()}
    step(weights, 0.02, generator)
    unfinished = policy.begin(weights)
    with pytest.raises(Absent):
        worker.fetch(policy.folder, unfinished)
    assert worker.has(before)
    # The ranks have other bytes than the last publication now, and write everything.
    worker.fetch(policy.folder, policy.publish(weights))
    assert worker.has(weights)


def test_a_reader_whose_base_is_lost_needs_a_full_image(tmp_path: Path, generator: torch.Generator) -> None:
    policy, weights = policy_of(tmp_path), random_weights(HF, generator)
    first = policy.publish(weights)
    step(weights, 0.02, generator)
    second = policy.publish(weights)
    shutil.rmtree(Path(policy.folder) / first)
    (worker,) = workers(HF, 1)
    with pytest.raises(Absent, match="rank-"):
        worker.fetch(policy.folder, second)
    worker.fetch(policy.folder, policy.publish(weights, full=True))
    assert worker.has(weights)


@pytest.mark.parametrize("at", ["layout-00001", "000000001/rank-00001", "000000001.json"])
def test_a_changed_byte_is_found(tmp_path: Path, generator: torch.Generator, at: str) -> None:
    policy, weights = policy_of(tmp_path), random_weights(HF, generator)
    policy.publish(weights)
    step(weights, 0.02, generator)
    name = policy.publish(weights)
    file = Path(policy.folder) / policy.name / at
    data = bytearray(file.read_bytes())
    for place in [20] if at.endswith(".json") else range(20, len(data), max(1, len(data) // 7)):
        damaged = bytearray(data)
        damaged[place] ^= 4
        file.write_bytes(damaged)
        (worker,) = workers(HF, 1)
        with pytest.raises(DamagedFiles):
            worker.fetch(policy.folder, name)
        assert worker.reader.image is None or worker.reader.image.name != name
    file.write_bytes(data)
    worker.fetch(policy.folder, name)
    assert worker.has(weights)


def test_another_models_files_are_refused(tmp_path: Path, generator: torch.Generator) -> None:
    policy = policy_of(tmp_path)
    other = {**HF, "num_hidden_layers": 3}
    (worker,) = workers(other, 1)
    with pytest.raises(Incomplete, match=r"layers\.2"):
        worker.fetch(policy.folder, policy.publish(random_weights(HF, generator)))


def test_a_rank_that_cannot_write_its_layout_tries_again(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, weights = policy_of(tmp_path), random_weights(HF, generator)
    (worker,) = workers(HF, 1)
    fail_once(monkeypatch)
    worker.fetch(policy.folder, policy.publish(weights))
    assert worker.has(weights)


def test_a_rank_that_cannot_write_changes_writes_everything(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, weights = policy_of(tmp_path), random_weights(HF, generator)
    (worker,) = workers(HF, 1)
    worker.fetch(policy.folder, policy.publish(weights))
    step(weights, 0.02, generator)
    fail_once(monkeypatch)
    name = policy.publish(weights)
    assert [report.changed == report.elements for report in policy.reports] == [True, False, False, False]
    worker.fetch(policy.folder, name)
    assert worker.has(weights)


def fail_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the next write to any folder fail."""
    write, failures = FolderStore.writing, iter([True])

    def fails_once(self: FolderStore, key: str) -> Any:
        if next(failures, False):
            raise StoreError("the disk is full for a moment")
        return write(self, key)

    monkeypatch.setattr(FolderStore, "writing", fails_once)
    monkeypatch.setattr("time.sleep", lambda seconds: None)


# ---- readers that die, files that are old --------------------------------------------------------------------------


def test_a_cache_outlives_the_worker(tmp_path: Path, generator: torch.Generator) -> None:
    """Restarts a worker with its image: an up-to-date image needs nothing, an interrupted one only what is missing."""
    policy, weights = policy_of(tmp_path, LAYOUTS[0]), random_weights(HF, generator)
    (shard,) = architecture(HF).engine_layout(HF, 1, 1).shards
    file = tmp_path / "cache" / "worker-0.image"

    def restarted() -> Worker:
        return Worker(HF, shard, file=file)

    first = restarted()
    name = policy.publish(weights)
    whole = first.fetch(policy.folder, name).read
    with pytest.raises(UserError, match=r"weights\.files\.cache"):
        restarted().fetch(policy.folder, name)
    first.reader.close()
    second = restarted()
    assert second.fetch(policy.folder, name).read == 0 and second.has(weights)
    image = second.reader.image
    assert image is not None
    image.name = ""  # as a worker that is killed while it writes
    image.tensor("model.norm.weight", next(p.box for p in shard.pieces if p.tensor == "model.norm.weight")).zero_()
    second.reader.close()
    third = restarted()
    assert 0 < third.fetch(policy.folder, name).read < whole / 100 and third.has(weights)


def test_a_cache_that_was_damaged_between_two_workers_is_found(tmp_path: Path, generator: torch.Generator) -> None:
    policy, weights = policy_of(tmp_path, LAYOUTS[0]), random_weights(HF, generator)
    file = tmp_path / "cache" / "worker-0.image"
    (first,) = workers(HF, 1, file=file)
    first.fetch(policy.folder, policy.publish(weights))
    first.reader.close()
    with file.open("r+b") as image:
        image.seek(64)
        image.write(bytes(15) + b"\x7f")
    weights["model.norm.weight"] += 1
    changes = policy.publish(weights)
    (second,) = workers(HF, 1, file=file)
    with pytest.raises(DamagedFiles, match="cache of weights"):
        second.fetch(policy.folder, changes)
    second.fetch(policy.folder, policy.publish(weights, full=True))
    assert second.has(weights)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_cache_is_compared_before_changes_are_added(tmp_path: Path, generator: torch.Generator, tensor: int) -> None:
    """Reads the image of an earlier worker, whose shard has whole chunks of the publication, or parts of chunks."""
    policy, weights = policy_of(tmp_path, LAYOUTS[0]), random_weights(HF, generator)
    files = [tmp_path / f"worker-{rank}.image" for rank in range(tensor)]
    earlier = [[*workers(HF, tensor, file=file)][rank] for rank, file in enumerate(files)]
    full = policy.publish(weights)
    for worker in earlier:
        worker.fetch(policy.folder, full)
        worker.reader.close()
    step(weights, 0.02, generator)
    changes = policy.publish(weights)
    later = [[*workers(HF, tensor, file=file)][rank] for rank, file in enumerate(files)]
    for worker in later:
        assert worker.fetch(policy.folder, changes).publications == (1 if tensor == 1 else 2)
        assert worker.has(weights)


def test_a_full_image_brings_a_lost_layout_back(tmp_path: Path, generator: torch.Generator) -> None:
    policy, weights = policy_of(tmp_path), random_weights(HF, generator)
    policy.publish(weights)
    (Path(policy.folder) / policy.name / "layout-00000").unlink()
    (worker,) = workers(HF, 1)
    with pytest.raises(Absent, match="layout-00000"):
        worker.fetch(policy.folder, policy.publish(weights))
    worker.fetch(policy.folder, policy.publish(weights, full=True))
    assert worker.has(weights)


def test_old_files_go_and_others_stay(tmp_path: Path, generator: torch.Generator) -> None:
    weights = random_weights(HF, generator)
    earlier = policy_of(tmp_path)
    earlier.publish(weights)
    earlier.begin(weights)  # a writer that died
    policy = policy_of(tmp_path)
    names = [policy.publish(weights, full=number in (0, 2)) for number in range(4)]
    folder = Path(policy.folder)
    (folder / "notes.txt").write_text("mine")
    disguised = folder / earlier.name / "000000009" / "rank-00000"
    disguised.parent.mkdir()
    disguised.write_text("not written by a publisher")
    collect(open_store(policy.folder), policy.name, 2)
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    kept = {f"{policy.name}/layout-{rank:05d}" for rank in range(4)}
    kept |= {f"{name}/rank-{rank:05d}" for name in names[2:] for rank in range(4)} | {f"{n}.json" for n in names[2:]}
    assert left == kept | {"notes.txt", str(disguised.relative_to(folder))}
    (worker,) = workers(HF, 1)
    worker.fetch(policy.folder, names[3])
    assert worker.has(weights)


@pytest.mark.parametrize("folder", ["memory://x", "http://host/x"])
def test_a_store_that_cannot_serve_is_refused_before_a_start(folder: str) -> None:
    config = compose(None, ["model.path=x", f"weights.files.folder={folder}"])
    check_values(config)
    with pytest.raises(UserError, match=r"weights\.files\.folder"):
        raise_first(config, config.weights.files.refusals())


def test_directories_of_versions_replace_each_other(tmp_path: Path) -> None:
    """Keeps the last two, writes each version once, and removes nothing that an export did not write."""
    written: list[Path] = []

    def export(path: Path) -> None:
        written.append(path)
        path.mkdir(parents=True)
        (path / "model.safetensors").write_text("weights")
        (path / ".exported.json").write_text(json.dumps({"model.safetensors": 7}))

    directories = VersionDirectories(tmp_path / "directories", export)
    first = directories(1)
    assert directories(1) == first
    (first / "notes.txt").write_text("mine")
    for version in (2, 3, 4):
        directories(version)
    assert [path.name for path in written] == [f"version-{version:09d}" for version in (1, 2, 3, 4)]
    assert sorted(p.name for p in (tmp_path / "directories").iterdir()) == [written[i].name for i in (0, 2, 3)]


def test_the_plan_command_counts_a_copy_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    settings = ["cluster.device=cuda", "policy.ranks=4", "policy.layout.expert=2", "rollout.tensor=2"]
    command = ["plan", "--model", str(tmp_path), "model.dtype=bfloat16", "weights.transport=files", *settings]
    assert main([*command, "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)["files"]
    copy = copy_bytes("bfloat16", False, architecture(HF).tensors(HF))
    assert counted["full"] == copy and counted["rank"] < copy / 3 and copy / 2 < counted["worker"] < copy
    assert main(command) == 0
    assert "weights by files: at most" in capsys.readouterr().out


def test_an_unknown_address_is_a_users_error() -> None:
    with pytest.raises(UserError, match=r"weights\.files\.folder = nosuch://x"):
        open_store("nosuch://x")
