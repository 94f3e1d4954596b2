"""Measures the retrieval service and its indexes.

    python benchmarks/retriever.py load --index DIR --queries FILE --rate 25 --seconds 300 [--kill-at 120]
    python benchmarks/retriever.py recall --index DIR --queries FILE --faiss HNSW32 --faiss-search efSearch=64

`load` starts the service on loopback and sends single queries at fixed times, answered or not (an open loop), so a slow
moment shows in all following latencies. A latency counts from the time at which the query was due. `--kill-at` kills
the service in the middle; the service is restarted, and clients retry. `recall` compares an approximate index with
exact search over the same vectors.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from skyrl_mega.retriever.client import TOKEN_VARIABLE, SearchClient
from skyrl_mega.retriever.dense import DenseBuilder, DenseIndex
from skyrl_mega.retriever.index import Index
from skyrl_mega.retriever.session import RetrieverProcess

WAITING_CLIENTS = 256
"""Threads waiting for answers; a rate with more waiting threads is beyond the service."""


def main() -> None:
    """Parses the command line and prints a JSON object."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=about)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("load", "recall"):
        command = commands.add_parser(name)
        command.add_argument("--index", type=Path, required=True, help="index folder")
        command.add_argument("--queries", type=Path, required=True, help="JSON lines with question")
        command.add_argument("--topk", type=int, default=3)
        command.add_argument("--threads", type=int, default=1, help="of the embedding model")
    commands.choices["load"].add_argument("--rate", type=float, default=25.0, help="queries per second")
    commands.choices["load"].add_argument("--seconds", type=float, default=300.0)
    commands.choices["load"].add_argument("--method", choices=("dense", "bm25"))
    commands.choices["load"].add_argument("--kill-at", type=float, help="seconds after the first query")
    commands.choices["recall"].add_argument("--faiss", default="HNSW32")
    commands.choices["recall"].add_argument("--faiss-search", default="")
    args = parser.parse_args()
    with args.queries.open(encoding="utf-8") as lines:
        queries = [json.loads(line)["question"] for line in lines]
    print(json.dumps(load(args, queries) if args.command == "load" else recall(args, queries), indent=1))


def load(args: argparse.Namespace, queries: list[str]) -> dict[str, object]:
    """Returns latencies in milliseconds at a fixed rate."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "retriever.log"
        service = RetrieverProcess(args.index.absolute(), ["--threads", str(args.threads)], log, TOKEN_VARIABLE, print)
        client = SearchClient(service.start(), timeout_s=60)
        client.search(queries[:64], args.topk, args.method)
        count, start = int(args.rate * args.seconds), time.monotonic() + 0.5
        answered: list[float] = []
        errors: list[str] = []

        def ask(i: int) -> None:
            due = start + i / args.rate
            time.sleep(max(due - time.monotonic(), 0))
            try:
                hits = client.search([queries[i % len(queries)]], args.topk, args.method)[0]
                assert args.method == "bm25" or len(hits) == args.topk
                answered.append(time.monotonic() - due)
            except Exception as error:  # a lost query, counted and shown
                errors.append(repr(error))

        try:
            with ThreadPoolExecutor(WAITING_CLIENTS) as threads:
                asked = [threads.submit(ask, i) for i in range(count)]
                if args.kill_at is not None:
                    time.sleep(max(start + args.kill_at - time.monotonic(), 0))
                    assert service.process is not None
                    os.kill(service.process.pid, signal.SIGKILL)
                for one in asked:
                    one.result()
            took = time.monotonic() - start
        finally:
            client.close()
            service.stop()
    ms = 1000 * np.sort(answered)
    return {
        "asked_per_s": args.rate,
        "answered_per_s": round(len(answered) / took, 2),
        "asked": count,
        "lost": len(errors),
        "first_error": errors[0] if errors else None,
        "killed_at_s": args.kill_at,
        **{f"p{p}_ms": round(float(np.percentile(ms, p)), 1) for p in (50, 90, 99)},
        "longest_ms": round(float(ms[-1]), 1),
    }


def recall(args: argparse.Namespace, queries: list[str]) -> dict[str, object]:
    """Returns the share of exact nearest neighbours found by an approximate index."""
    index = Index(args.index, threads=args.threads)
    vectors = index.dense.index.reconstruct_n(0, index.size)
    asked = index.embedder.queries(queries)
    exact = np.argsort(-(asked @ vectors.T), axis=1)  # NumPy, not FAISS: independent of the measured code
    builder = DenseBuilder(vectors.shape[1], args.faiss)
    builder.add(vectors)
    with tempfile.TemporaryDirectory() as folder:
        builder.save(Path(folder) / "dense.faiss")
        built = DenseIndex(Path(folder) / "dense.faiss", args.faiss_search, args.threads)
    result: dict[str, object] = {"passages": index.size, "queries": len(queries)}
    for name, searched in ((index.recipe.faiss, index.dense), (args.faiss, built)):
        start = time.perf_counter()
        _, rows = searched.search(asked, 10)
        took = time.perf_counter() - start
        shares = {
            f"recall@{k}": round(
                float(
                    np.mean([len({*a[:k]} & {*b[:k]}) / k for a, b in zip(rows.tolist(), exact.tolist(), strict=True)])
                ),
                4,
            )
            for k in (1, 3, 10)
        }
        result[name] = {**shares, "ms_per_query": round(1000 * took / len(queries), 3)}
    return result


if __name__ == "__main__":
    main()
