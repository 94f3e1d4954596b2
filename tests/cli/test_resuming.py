"""Messages about changed settings of a resumed run, before any start."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_mega.cli import resuming
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.compose import compose, dump
from skyrl_mega.config.keys import keys
from skyrl_mega.config.schema import Config
from skyrl_mega.data.fingerprint import fingerprint
from skyrl_mega.trainer import checkpoints
from skyrl_mega.trainer.checkpoints import Checkpoints, describe_resume
from skyrl_mega.trainer.setup import stream_of

BUILT = "model.build={hidden: 64}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a run of 4 steps with a checkpoint of step 2: 8 of 20 prompts are used."""
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump(config(tmp_path)))
    save(run, 2, 8)
    return tmp_path


def config(folder: Path, *settings: str) -> Config:
    base = ["run.name=r", f"run.directory={folder}/runs", "run.steps=4", "data.prompts_per_step=4", BUILT]
    return compose(None, [*base, *settings])


def save(run: Path, step: int, position: int) -> None:
    stream = {"position": position, "count": 20, "seed": 0, "shuffle": True}
    checkpoints = Checkpoints(run / "checkpoints", keep=2)
    checkpoints.save(step, {"step": step, "stream": stream}, {"policy": lambda to: (to / "weights").touch()})


def test_what_changed_is_told_in_one_line(folder: Path) -> None:
    assert resuming.changes(config(folder)) == []
    changes = resuming.changes(config(folder, "run.steps=8", "policy.layout.tensor=2", "algorithm.clip_high=0.3"))
    assert changes == ["run.steps 4 → 8", "policy.layout.tensor 1 → 2", "algorithm.clip_high 0.2 → 0.3"]
    assert resuming.changes_text(changes).startswith(
        "settings changed since the run was last started: run.steps 4 → 8, policy."
    )
    assert resuming.changes(config(folder, "reference.layout={tensor: 2}")) == [
        "reference.layout null → a group",
        "reference.layout.tensor 1 → 2",
    ]


def test_a_critic_cannot_join_a_run_that_had_none(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"algorithm\.advantage = gae: .*step_000002 has no critic; set it back, or give"
    ):
        resuming.changes(config(folder, "algorithm.advantage=gae"))
    (folder / "runs" / "r" / "checkpoints" / "step_000002" / "critic").mkdir()
    assert resuming.changes(config(folder, "algorithm.advantage=gae")) == ['algorithm.advantage "grpo" → "gae"']


def test_another_value_from_the_environment_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["model={path: '${oc.env:A_MODEL}'}", "environment.options.mine={password: '${oc.env:A_WORD}'}"]
    base = ["run.name=r", f"run.directory={tmp_path}/runs", *given]
    for name, value in {"A_MODEL": "/models/one", "A_WORD": "first-secret"}.items():
        monkeypatch.setenv(name, value)
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump(compose(None, base)))
    save(run, 2, 8)
    for name, value in {"A_MODEL": "/models/two", "A_WORD": "second-secret"}.items():
        monkeypatch.setenv(name, value)
    assert resuming.changes(compose(None, base)) == ['model.path "/models/one" → "/models/two"']


FIXED = ("run.seed=1", "data.shuffle=false")


@pytest.mark.parametrize("setting", [*FIXED, "policy.moe.freeze_router=true"])
def test_what_a_checkpoint_is_bound_to_may_not_change(folder: Path, setting: str) -> None:
    with pytest.raises(UserError) as refused:
        resuming.changes(config(folder, setting))
    message = str(refused.value)
    assert (
        message.startswith(setting.partition("=")[0])
        and "step_000002 was made with " in message
        and "\n" not in message
    )


def test_the_table_names_settings_that_are_there() -> None:
    assert set(resuming.FIXED) <= set(keys())
    page = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
    assert all(f"`{key}`" in page for key in resuming.FIXED)


def test_without_a_checkpoint_all_may_change(folder: Path) -> None:
    assert resuming.changes(config(folder, "run.seed=1", "run.name=other")) == []
    assert resuming.changes(config(folder, "run.seed=1", "checkpoint.resume=false")) == []
    (folder / "runs" / "r" / "checkpoints" / "step_000002" / "policy" / "weights").write_text("damaged")
    assert resuming.changes(config(folder, "run.seed=1")) == []


def test_a_run_that_is_done_has_nothing_to_do(folder: Path) -> None:
    run = folder / "runs" / "r"
    assert resuming.nothing_left(config(folder)) is None
    assert "all 2 steps are done" in (resuming.nothing_left(config(folder, "run.steps=2")) or "")
    assert resuming.nothing_left(config(folder, "run.steps=2", "checkpoint.export=true")) is None
    (run / "model").mkdir()
    assert resuming.nothing_left(config(folder, "run.steps=2", "checkpoint.export=true")) is not None
    save(run, 3, 18)
    assert "used up after step 3" in (resuming.nothing_left(config(folder)) or "")
    assert resuming.nothing_left(config(folder, "run.epochs=2")) is None


def test_a_fault_promises_what_is_saved(folder: Path) -> None:
    checkpoints = folder / "runs" / "r" / "checkpoints"
    assert describe_resume(checkpoints).endswith("step_000002 is saved: the same command resumes after step 2")
    off = describe_resume(checkpoints, resume=False)
    assert off.endswith("step_000002 is saved: the same command with checkpoint.resume=true resumes from it")
    (checkpoints / "step_000002" / "state.json").write_text(json.dumps({}))
    damaged = "every saved checkpoint is damaged: the same command begins with the first step"
    assert describe_resume(checkpoints) == damaged
    assert describe_resume(folder / "absent").startswith("no checkpoint is saved")


@pytest.mark.parametrize(
    "state",
    [{}, {"step": 2}, {"step": "2", "stream": {}}, {"step": 2, "stream": 5}, {"step": True, "stream": {"count": 1}},
     {"step": 2, "stream": {"count": -1, "position": 0, "seed": 0, "shuffle": True}},
     {"step": 2, "stream": {"count": 20, "position": 8}}],
)  # fmt: skip
def test_an_odd_state_is_one_line(folder: Path, state: dict[str, object]) -> None:
    file = folder / "runs" / "r" / "checkpoints" / "step_000002" / "state.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(checkpoints._with_checksum({**state, "files": saved["files"], "crc32": saved["crc32"]})))
    with pytest.raises(UserError, match=r"state\.json: .*step_000002"):
        resuming.nothing_left(config(folder))


def test_other_rows_under_the_same_name_are_told(folder: Path) -> None:
    file = folder / "train.parquet"
    pq.write_table(pa.table({"prompt": ["1", "2"]}), file)
    given = config(folder, f"data.train=[{file}]")
    (folder / "runs" / "r" / "config.yaml").write_text(dump(given))
    stream = stream_of(given, 20)
    stream.take(8)
    checkpoints = Checkpoints(folder / "runs" / "r" / "checkpoints", keep=2)
    checkpoints.save(3, {"step": 3, "stream": stream.state()}, {"policy": lambda to: (to / "weights").touch()})
    assert resuming.changes(given) == []
    pq.write_table(pa.table({"prompt": ["1", "3"]}), file)
    assert resuming.changes(given) == ["the rows in data.train (the position in them is kept)"]
    again = stream_of(given, 20)
    again.restore(stream.state())
    assert (again.position, again.state()["rows"]) == (8, fingerprint([file])) != (8, stream.state()["rows"])
    file.unlink()  # `data.prepare` writes the file again
    assert resuming.changes(given) == []
