"""Files with large rows, read and written in pieces of bounded bytes, and numbers outside every column type."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_mega.common import records, safe_read
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.data import check_files, load_prompts, write
from skyrl_mega.data.prepare import prepare

WORDS = "many words " * 1000


def rows(count: int) -> Iterator[dict[str, Any]]:
    for index in range(count):
        prompt = [{"role": "user", "content": f"{index} {WORDS}"}]
        yield {"prompt": prompt, "env_class": "gsm8k", "reward_spec": {"ground_truth": str(index)}}


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Limits Arrow's pieces to 100 rows in place of 2 GiB, and returns the requested piece sizes."""
    asked, read = list[int](), pq.ParquetFile.iter_batches

    def iter_batches(self: pq.ParquetFile, batch_size: int, **options: Any) -> Iterator[pa.RecordBatch]:
        asked.append(batch_size)
        for batch in read(self, batch_size, **options):
            if len(batch) > 100:
                raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    return asked


def test_a_piece_that_is_too_large_for_arrow_is_read_in_halves(tmp_path: Path, limited: list[int]) -> None:
    pq.write_table(pa.Table.from_pylist([*rows(1000)]), tmp_path / "a.parquet")
    assert check_files([tmp_path / "a.parquet"], EnvironmentConfig()) == 1000
    prompts = load_prompts([tmp_path / "a.parquet"], EnvironmentConfig())
    assert [prompt.uid for prompt in prompts] == [*range(1000)]
    assert [prompt.extras["reward_spec"]["ground_truth"] for prompt in prompts] == [str(n) for n in range(1000)]
    assert [r["reward_spec"]["ground_truth"] for r in records.records(tmp_path / "a.parquet")] == [
        *map(str, range(1000))
    ]


def test_pieces_are_bounded_by_the_bytes_that_a_file_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.Table.from_pylist([*rows(300)]), tmp_path / "a.parquet", row_group_size=100, use_dictionary=False)
    with pq.ParquetFile(tmp_path / "a.parquet") as reader:
        assert [len(batch) for batch in records.bounded_batches(reader, 1000)] == [300]
        monkeypatch.setattr(records, "BYTES_AT_ONCE", 30 * len(WORDS))
        sizes = [len(batch) for batch in records.bounded_batches(reader, 1000)]
    assert sum(sizes) == 300 and max(sizes) <= 30


def test_row_groups_are_bounded_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "BYTES_AT_ONCE", 100 * len(WORDS))
    assert write.write_rows(rows(250), tmp_path / "a.parquet") == 250
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [100, 100, 50]
    assert len(load_prompts([tmp_path / "a.parquet"], EnvironmentConfig())) == 250


@pytest.mark.parametrize("digits", [20, 400, 5000])
def test_whole_numbers_that_no_column_takes(tmp_path: Path, digits: int) -> None:
    with pytest.raises(UserError, match=r"a\.parquet: a row has a whole number of more than 64 bits; write it as text"):
        write.write_rows(iter([{"a": 10**digits}]), tmp_path / "a.parquet")
    assert not (tmp_path / "a.parquet").exists()
    if digits > 20:
        with pytest.raises(safe_read.Malformed):
            safe_read.parse_json(f'{{"a": [{"1" * digits}]}}')
        (tmp_path / "q.jsonl").write_text(f'{{"question": "q", "answer": {"1" * digits}}}\n')
        with pytest.raises(UserError, match=r"q\.jsonl, row 0: it cannot be read as \.jsonl"):
            prepare(f"search --source {tmp_path / 'q.jsonl'} --output {tmp_path}")
    assert safe_read.parse_json(f"{2**128}") == 2**128
