"""Command line of `python -m skyrl_mega.retriever`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.terminal import printable
from skyrl_mega.config.command import MOST, Parser, integer, path_of, real
from skyrl_mega.retriever.client import TOKEN_VARIABLE, RetrievalError, SearchClient

METHODS = ("dense", "bm25")
"""Allowed values of `--methods`."""
DTYPES = ("float32", "bfloat16", "float16")


def parser() -> argparse.ArgumentParser:
    """Returns the command-line parser, with the subcommands build, serve, query and run (`run` only for the help)."""
    root = Parser(prog="python -m skyrl_mega.retriever", description="Searches passages for environments.")
    commands = root.add_subparsers(dest="command", required=True, metavar="build|serve|query|run")
    _add_build(commands.add_parser("build", help="makes an index from a corpus"))
    _add_serve(commands.add_parser("serve", help="answers searches over HTTP"))
    _add_query(commands.add_parser("query", help="asks a service and prints what it finds"))
    commands.add_parser("run", help="serves the index of a run's settings to other nodes")
    return root


def main(arguments: Sequence[str]) -> int:
    """Runs the subcommand build, serve or query of `python -m skyrl_mega.retriever`; returns the exit code 0. `serve`
    returns after SIGTERM or SIGINT.

    Args:
        arguments: The command line without the program.

    Raises:
        UserError: An option, a file or an address is invalid, or a service does not answer a query.
        OSError: A file cannot be written: the index, or the ready file.
    """
    args = parser().parse_args(list(arguments))
    if args.command == "build":
        _build(args)
    elif args.command == "serve":
        _serve(args)
    else:
        _query(args)
    return 0


def build_index(arguments: Sequence[str], output: Path, say: Callable[[str], None]) -> bool:
    """Runs the subcommand `build`; returns True if the index was built now, False if it was up to date.

    Args:
        arguments: Options of the subcommand, without `--output`.
        output: Folder of the index.
        say: Receives lines about the progress.

    Raises:
        UserError: An option, the corpus or the model is invalid, or `output` holds something else.
        OSError: `output` cannot be written.
    """
    args = parser().parse_args(["build", *arguments, "--output", str(output)])
    return _build(args, say)


def _add_build(p: argparse.ArgumentParser) -> None:
    p.add_argument("--corpus", type=path_of, required=True, help=".jsonl or .parquet with id, title, text")
    p.add_argument("--output", type=path_of, required=True, help="the index folder; one that is up to date is left")
    p.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        help="the first is what the service uses unless it is told otherwise (default: dense bm25)",
    )
    p.add_argument("--model", default="minilm", help="embedding model: a Hugging Face directory (default: minilm)")
    p.add_argument("--query-prefix", default="", help='before each query; E5 wants "query: "')
    p.add_argument("--passage-prefix", default="", help='before each passage; E5 wants "passage: "')
    p.add_argument("--dtype", choices=DTYPES, default="float32", help="the model computes in it (default: float32)")
    p.add_argument("--faiss", default="Flat", help="FAISS index: Flat is exact; HNSW32; IVF4096,SQ8 … (default: Flat)")
    p.add_argument("--limit", type=integer(1, MOST), help="the first so many passages")
    _add_device(p)


def _add_serve(p: argparse.ArgumentParser) -> None:
    p.add_argument("--index", type=path_of, required=True, help="the index folder")
    p.add_argument(
        "--host", default="127.0.0.1", help=f"others than loopback need ${TOKEN_VARIABLE} (default: %(default)s)"
    )
    p.add_argument("--port", type=integer(0, 65535), default=8000, help="0 takes a free one (default: %(default)s)")
    p.add_argument(
        "--topk", type=integer(1, 1000), default=3, help="passages where a request does not say (default: %(default)s)"
    )
    p.add_argument("--method", choices=METHODS, help="where a request does not say (default: the index's first)")
    p.add_argument(
        "--batch", type=integer(1, 10**6), default=64, help="queries searched together at most (default: %(default)s)"
    )
    p.add_argument(
        "--wait-ms", type=real(0, 1000), default=3.0, help="a batch waits so long for more (default: %(default)s)"
    )
    p.add_argument(
        "--waiting", type=integer(1, 10**7), default=8192, help="waiting queries; past it 503 (default: %(default)s)"
    )
    p.add_argument("--faiss-search", default="", help="FAISS search parameters, efSearch=128 or nprobe=32")
    p.add_argument("--ready-file", type=path_of, help="written when it answers: JSON with url and pid")
    p.add_argument("--with-stdin", action="store_true", help="ends when standard input does")
    _add_device(p)


def _add_query(p: argparse.ArgumentParser) -> None:
    p.add_argument("queries", nargs="+", help="what to look for")
    p.add_argument("--url", default="http://127.0.0.1:8000", help="the service (default: %(default)s)")
    p.add_argument("--topk", type=integer(1, 1000), default=3, help="passages of each query (default: %(default)s)")
    p.add_argument("--method", choices=METHODS, help="default: the service's own")
    p.add_argument(
        "--timeout", type=real(0.1, 10**6), default=30.0, help="seconds, retries included (default: %(default)s)"
    )


def _add_device(p: argparse.ArgumentParser) -> None:
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the embedding model")
    p.add_argument(
        "--threads", type=integer(1, 4096), help="CPU threads of the embedding model (default: torch's own number)"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _build(args: argparse.Namespace, say: Callable[[str], None] = _say) -> bool:
    from skyrl_mega.retriever.build import build

    names = "corpus output model query_prefix passage_prefix dtype faiss limit device threads"
    given = {name: getattr(args, name) for name in names.split()}
    return build(**given, methods=tuple(dict.fromkeys(args.methods)), say=say)


def _serve(args: argparse.Namespace) -> None:
    from skyrl_mega.retriever.batcher import BatchLimits
    from skyrl_mega.retriever.service import Service, check_address, serve

    token = os.environ.get(TOKEN_VARIABLE) or None
    check_address(args.host, token)
    service = Service(
        args.index,
        topk=args.topk,
        method=args.method,
        token=token,
        limits=BatchLimits(args.batch, args.wait_ms / 1000, args.waiting),
        device=args.device,
        threads=args.threads,
        faiss_search=args.faiss_search,
    )
    serve(service, args.host, args.port, args.ready_file, args.with_stdin)


def _query(args: argparse.Namespace) -> None:
    client = SearchClient(args.url, os.environ.get(TOKEN_VARIABLE), args.timeout)
    try:
        for query, hits in zip(args.queries, client.search(args.queries, args.topk, args.method), strict=True):
            print(printable(query))
            for hit in hits:
                print(printable(f"  {hit.score:7.3f}  {hit.id}  {' '.join(hit.contents.split())}"))
    except RetrievalError as error:
        raise UserError(str(error)) from error
    finally:
        client.close()
