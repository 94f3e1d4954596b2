"""`python -m skyrl_mega.weights plan`: transfers, links and time of a weight sync. Needs no GPU.

`python -m skyrl_mega.weights check`: comparison of engine weights with policy weights after real syncs.

`python -m skyrl_mega.weights logprobs`: comparison of log-probs by engine, policy and transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.terminal import one_line
from skyrl_mega.config.checks import check_values
from skyrl_mega.config.checks.engines import check_topology
from skyrl_mega.config.command import DONE, FAULT, Parser, guarded, integer, print_error
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import Config
from skyrl_mega.weights.members import FILES


def plan(argv: Sequence[str]) -> int:
    """Prints cost and links of the weight sync planned for a run's settings: the subcommand `plan`.

    Reads only the settings and the model's config.json; starts nothing. With `weights.transport=files`, prints the
    bytes of the files instead.

    Args:
        argv: The arguments after the subcommand.

    Returns:
        The exit code 0.

    Raises:
        UserError: The settings are wrong, or the model cannot be split into a layout.
    """
    p = _parser("plan", "Plans a weight sync from the settings and config.json alone, and prints what it costs.")
    args = p.parse_intermixed_args(argv)
    config, hf = _settings(args)

    from skyrl_mega.weights.files.cost import file_bytes, file_lines
    from skyrl_mega.weights.plan import report
    from skyrl_mega.weights.plan.cost import cost, host_time
    from skyrl_mega.weights.plan.sync_plan import sync_plan, wire_text

    if config.weights.transport == FILES:
        counted = file_bytes(config, hf)
        print(
            json.dumps({"files": counted}) if args.json else "\n".join([_title(config), *file_lines(counted, config)])
        )
        return DONE
    start = time.perf_counter()
    transfers = sync_plan(config, hf)
    seconds = time.perf_counter() - start
    count, host = cost(transfers), host_time(transfers, int(config.weights.bucket_mib * 2**20))
    if args.json:
        print(json.dumps(report.values(transfers, count, host, seconds, wire_text(config))))
    else:
        print(f"{_title(config)}\n\n{report.table(transfers, count, host, seconds)}")
    return DONE


def check(argv: Sequence[str]) -> int:
    """Starts policy and engines, synchronises twice, compares every engine's parameters with the policy's, and prints
    the result; with `--json` as JSON. A failed actor, cluster or service is printed to standard error.

    Args:
        argv: The arguments after the subcommand `check`.

    Returns:
        The exit code: 0 if all are equal, 1 if a parameter differs, or if an actor, the cluster or a service failed.

    Raises:
        UserError: An option or a setting is wrong.
    """
    p = _parser("check", "Starts policy and engines, synchronises twice, and compares all weights, name by name.")
    args = p.parse_intermixed_args(argv)
    overrides = _overrides(args)

    from skyrl_mega.cli.weights_check import compare, table

    with _fault_printed():
        workers = compare(args.config, overrides, as_json=args.json)
        print(json.dumps([asdict(worker) for worker in workers]) if args.json else table(workers))
        return FAULT if any(worker.different for worker in workers) else DONE
    return FAULT


def logprobs(argv: Sequence[str]) -> int:
    """Starts policy and engines, answers some prompts, compares the log-probs of every sampled token, and prints the
    result; with `--json` as JSON. A failed actor, cluster or service is printed to standard error.

    Args:
        argv: The arguments after the subcommand `logprobs`.

    Returns:
        The exit code: 0 if all agree, 1 if they differ too much, or if an actor, the cluster or a service failed.

    Raises:
        UserError: An option or a setting is wrong.
    """
    p = _parser("logprobs", "Starts policy and engines, plays prompts, and compares log-probs, token by token.")
    p.add_argument("--prompts", type=integer(1, 10**6), default=8, metavar="N", help="training prompts (default: 8)")
    p.add_argument("--samples", type=integer(1, 10**6), default=4, metavar="N", help="answers of each (default: 4)")
    p.add_argument("--worst", type=integer(1, 10**6), default=8, metavar="N", help="tokens shown (default: 8)")
    p.add_argument(
        "--no-transformers", action="store_true", help="leave out transformers, which loads the model in float32 here"
    )
    args = p.parse_intermixed_args(argv)
    overrides = _overrides(args)

    from skyrl_mega.cli.weights_logprobs import compare, table

    with _fault_printed():
        comparison = compare(
            args.config,
            overrides,
            prompts=args.prompts,
            samples=args.samples,
            worst=args.worst,
            transformers=not args.no_transformers,
            as_json=args.json,
        )
        print(json.dumps(asdict(comparison)) if args.json else table(comparison))
        return DONE if comparison.agree else FAULT
    return FAULT


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"plan": plan, "check": check, "logprobs": logprobs}
"""Functions by subcommand; each takes the remaining arguments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `python -m skyrl_mega.weights` with a subcommand: plan, check or logprobs.

    Args:
        arguments: The command line without the program; None takes `sys.argv`.

    Returns:
        The exit code: 0 done, 1 fault or difference, 2 invalid input.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    top = Parser(prog="python -m skyrl_mega.weights", description=__doc__, allow_abbrev=False)
    top.add_argument("command", choices=COMMANDS, help="each has --help of its own")
    return guarded(lambda: COMMANDS[top.parse_args(argv[:1]).command](argv[1:]), "--json" in argv)


def _parser(command: str, about: str) -> Parser:
    """Returns a parser with the arguments of all subcommands: the settings of a run."""
    p = Parser(prog=f"python -m skyrl_mega.weights {command}", description=about, allow_abbrev=False)
    p.add_argument("--config", metavar="FILE", help="a .yaml file of a run; without one the defaults hold")
    p.add_argument(
        "--model", metavar="PATH", help="config.json, its directory, or a known model such as Qwen/Qwen3-30B-A3B"
    )
    p.add_argument("--json", action="store_true", help="everything as one JSON object on standard output")
    p.add_argument(
        "overrides",
        nargs="*",
        metavar="group.key=value",
        help="settings over the file's: policy.ranks=32 policy.layout.tensor=2 policy.layout.expert=8 "
        "rollout.engines=4 rollout.tensor=8 rollout.options.enable_expert_parallel=true cluster.shared=true",
    )
    return p


def _overrides(args: argparse.Namespace) -> list[str]:
    """Returns the settings over the file's, for a subcommand that starts policy and engines.

    Raises:
        UserError: The file of the run is not named.
    """
    if args.config is None:
        raise UserError(
            "the file of a run is missing", key="--config", fix="give a .yaml file, such as configs/quickstart.yaml"
        )
    return [*args.overrides, *([f"model.path={args.model}"] if args.model else [])]


@contextmanager
def _fault_printed() -> Iterator[None]:
    """Prints a failed actor, cluster or service of `data.prepare` as a fault, and suppresses the error."""
    from skyrl_mega.cluster.errors import ActorFailed, ClusterError
    from skyrl_mega.envs.faults import InfrastructureFault

    try:
        yield
    except (ActorFailed, ClusterError) as error:
        print(f"fault: {error}", file=sys.stderr)
    except InfrastructureFault as error:
        print_error(f"fault: {one_line(str(error))}")


def _settings(args: argparse.Namespace) -> tuple[Config, Mapping[str, Any]]:
    """Returns the settings and the model's config.json. Data and devices are not checked, as only a run needs them."""
    config = compose(args.config, args.overrides)
    if args.model is not None:
        config.model.path = args.model
    check_values(config)
    check_topology(config)
    path = Path(config.model.path)
    if not config.model.path:
        raise UserError(
            "model.path is not set: allowed is a Hugging Face directory or its config.json", fix="give --model"
        )
    if config.model.build is not None and not path.exists():
        from skyrl_mega.models.tiny import hf_config

        return config, hf_config(config.model.build)
    from skyrl_mega.hf_checkpoint.index import read_config
    from skyrl_mega.models.published import hub_name, known

    if not path.exists() and hub_name(path):
        return config, known(path)
    return config, read_config(path.parent if path.name == "config.json" else path)


def _title(config: Config) -> str:
    """Returns a line with the model, both layouts, and whether they share GPUs."""
    from skyrl_mega.config.derived import engine_data, expert_parallel, policy_ranks

    layout, rollout = config.policy.layout, config.rollout
    cuts = {
        "TP": layout.tensor,
        "PP": layout.pipeline,
        "VPP": layout.virtual_pipeline,
        "CP" if layout.context_exchange == "ring" else "Ulysses": layout.context,
        "EP": layout.expert,
        "ETP": layout.expert_tensor or 1,
    }
    policy = " ".join(f"{name}{size}" for name, size in cuts.items() if size > 1) or "data parallel"
    engine = f"TP{rollout.tensor}" + (f" DP{data}" if (data := engine_data(rollout)) > 1 else "")
    wire = f"{config.model.dtype}{' (FP8 on the wire)' if config.weights.wire == 'fp8' else ''}"
    where = "on the same GPUs" if config.cluster.shared else "on GPUs of their own"
    return (
        f"{config.model.path}, {wire}: {policy_ranks(config)} policy ranks ({policy}) → "
        f"{rollout.engines} × {engine}{' EP' if expert_parallel(rollout) else ''}, {where}"
    )
