"""What every room's tests may ask for."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

import skyrl_mega.cluster  # noqa: F401  (before any test's module imports Ray: it then listens on loopback alone)

if TYPE_CHECKING:
    from skyrl_mega.rollout.renderer import Renderer

ROOT = Path(__file__).parents[1]

ALONE = (
    "cluster", "envs/sandbox", "envs/swe", "fuzz", "retriever",
    "benchmarks/test_gpu_proofs.py", "recipes/test_gsm8k_cpu.py", "recipes/test_searchr1_cpu.py",
    "rollout/test_generator.py", "rollout/test_waiting.py", "weights/test_faults.py", "weights/test_overhead.py",
    *(f"trainer/test_{name}.py" for name in (
        "asynchrony", "deterministic", "engine_faults", "parked_fault", "reference", "resume", "turns", "unnoticed",
    )),
)  # fmt: skip
"""Folders and files whose tests have the machine to themselves: they look for what a run leaves, measure time, or keep
both cores busy as it is. All others run beside others."""
FIRST = (
    "slurm",
    "megatron/test_loss_layouts.py",
    "trainer/test_schedules.py",
    "weights/test_scale.py",
    "weights/test_fp8_engine.py",
)
"""Those that take minutes begin first, so that none of them is left over for one core at the end."""

# The same examples every time, and no limit on an example's seconds: a busy machine must not fail what is right.
# HYPOTHESIS_PROFILE=explore draws new examples.
slow_is_fine = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=slow_is_fine)
settings.register_profile("explore", deadline=None, print_blob=True, suppress_health_check=slow_is_fine)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def among(names: Iterable[str], path: Path) -> bool:
    """Whether a test's file is one of these, or in one of these folders."""
    return not {ROOT / "tests" / name for name in names}.isdisjoint([path, *path.parents])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which `-m alone`, or `-m "not alone"`, leaves nothing need not be imported."""
    expression = config.option.markexpr.removeprefix("not slow and ").removeprefix("not nightly and ")
    asked = {"alone": True, "not alone": False}.get(expression)
    if collection_path.suffix != ".py" or asked is None:
        return None
    return True if among(ALONE, collection_path) is not asked else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what has to run alone, and puts what takes long before the rest."""
    for item in items:
        if among(ALONE, item.path):
            item.add_marker("alone")
    items.sort(key=lambda item: not among(FIRST, item.path))


@pytest.fixture(autouse=True)
def attention_of_one_model() -> Iterator[None]:
    """megatron-core tells Transformer Engine by variables which attention a model has: the next test's has its own."""
    yield
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the repository; tests that need it skip where it is absent."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"real data is absent: {folder}")
    return folder


@pytest.fixture(scope="session")
def stories(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained 260k-parameter Llama model as a Hugging Face directory (float32, tied, 8 heads of 8, 4 kv heads)."""
    from tests.support.stories import write

    return write(shared / "data" / "stories260k", tmp_path_factory.mktemp("stories"))


@pytest.fixture(scope="session")
def characters_chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """The `characters` tokenizer with its own template."""
    from tests.support.chats import characters

    return characters(tmp_path_factory.mktemp("chats") / "characters")


@pytest.fixture(scope="session")
def qwen_chat(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Qwen3's tokenizer and template."""
    from skyrl_mega.rollout.renderer import Renderer
    from tests.support.chats import qwen

    path = qwen(shared, tmp_path_factory.mktemp("chats") / "qwen")
    shutil.copy(shared / "data" / "qwen_tokenizer" / "qwen3_4b_config.json", path / "config.json")
    return Renderer(str(path))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory (float32, 0.5 GB, about 15 s to make, once for all workers)."""
    pytest.importorskip("gguf")
    from skyrl_mega.config.errors import UserError
    from skyrl_mega.models.smollm2 import gguf_file, write

    try:
        gguf_file()
    except UserError as absent:
        pytest.skip(str(absent))
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    with (folder / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return write(folder / "smollm2")
