"""Command line of an evaluation: compose, check, start engines or connect, sample missing answers, score.

Slow imports happen only after the preceding checks have passed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_mega.cli.train import stoppable
from skyrl_mega.cluster.temporary_files import write_whole
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.command import DONE, FAULT, Parser
from skyrl_mega.config.schema import Config
from skyrl_mega.evaluate import RESUME_HINT
from skyrl_mega.evaluate.published import PUBLISHED, matching_tables

if TYPE_CHECKING:
    from skyrl_mega.evaluate.endpoint import Endpoint
    from skyrl_mega.evaluate.results import Results
    from skyrl_mega.evaluate.sampling import AnswerSource
    from skyrl_mega.evaluate.sets import PromptSet
    from skyrl_mega.rollout.agent.renderer import Renderer
    from skyrl_mega.telemetry.console import Console


def parser() -> argparse.ArgumentParser:
    """Returns the argument parser of `python -m skyrl_mega.evaluate`."""
    p = Parser(
        prog="python -m skyrl_mega.evaluate",
        description="Scores a model on several sets and puts the tables beside published ones. Exit codes: 0 done, "
        "2 the input is wrong, 1 a fault, 75 stopped early. The same command goes on where it ended.",
        allow_abbrev=False,
    )
    p.add_argument("--config", metavar="FILE", help="a .yaml file of a run; without one the defaults hold")
    p.add_argument("--model", metavar="DIR", help="a Hugging Face directory; short for model.path=DIR")
    p.add_argument(
        "--set",
        action="append",
        default=[],
        dest="sets",
        metavar="[NAME=]FILE",
        help="a parquet file of prompts that are the set NAME, or are parted by data_source; without it, data.eval",
    )
    p.add_argument(
        "--endpoint", metavar="URL", help="an OpenAI-compatible endpoint to ask, in place of engines of its own"
    )
    p.add_argument("--served-model", metavar="NAME", help="the name that the endpoint serves the model under")
    p.add_argument(
        "--api-key-variable",
        default="OPENAI_API_KEY",
        metavar="VARIABLE",
        help="environment variable with the endpoint's key (default: OPENAI_API_KEY)",
    )
    p.add_argument(
        "--request", default="{}", metavar="JSON", help="more fields of every request; null takes a field out"
    )
    p.add_argument(
        "--published",
        choices=("auto", "none", *PUBLISHED),
        default="auto",
        help="published results beside ours; auto: those that have a row for one of the sets",
    )
    p.add_argument("--output", metavar="DIR", help="folder of the results; without it, runs/<name>/evaluation")
    p.add_argument("--json", action="store_true", help="the scores as a JSON line on standard output")
    p.add_argument("overrides", nargs="*", metavar="group.key=value", help="settings over the file's")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `python -m skyrl_mega.evaluate`: samples missing answers, scores them, writes and prints the tables.

    Args:
        arguments: The command line without the program; None takes `sys.argv`.

    Returns:
        The exit code: 0 done, 1 fault, 2 invalid input, or no sample has a score, 75 stopped by a signal.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    return stoppable(lambda: _run(parser().parse_intermixed_args(argv)), "--json" in argv)


def _run(args: argparse.Namespace) -> int:
    from skyrl_mega.config.checks import check_evaluation
    from skyrl_mega.config.compose import compose
    from skyrl_mega.config.derived import evaluation_concurrency

    config = compose(args.config, args.overrides)
    if args.model is not None:
        config.model.path = args.model
    endpoint = _endpoint(args)
    check_evaluation(config, starts_engines=endpoint is None)

    from skyrl_mega.cli import draft_checks, inputs, layout_checks, prepare
    from skyrl_mega.envs import registry
    from skyrl_mega.evaluate.identity import identity
    from skyrl_mega.evaluate.results import open_results
    from skyrl_mega.evaluate.sets import drop_long_prompts, load_sets
    from skyrl_mega.planner.fit import check_sandboxes
    from skyrl_mega.telemetry.console import Console

    registry.check(config.environment)
    config = replace(config, environment=registry.with_absolute_paths(config.environment))
    if endpoint is None:
        hf = inputs.model_config(config)
        layout_checks.check_engine(config, hf)
        draft_checks.check_suffix(config)
        draft_checks.check_draft_weights(config, hf)
        config = prepare.with_device(config, training=False)
    with Console(as_json=args.json) as console:
        if not args.sets:
            prepare.make_data(config, config.data.eval, console)
        sets = load_sets(config, args.sets)
        chat = None
        if endpoint is None:
            from skyrl_mega.models.registry import architecture
            from skyrl_mega.rollout.agent.renderer import Renderer

            chat = Renderer(config.model.path, config.rollout)
            chat.check_vocabulary(architecture(hf).describe(hf).vocab)
            sets = drop_long_prompts(sets, chat, config.rollout.max_prompt_tokens, config.environment)
        _check_tools(config, sets, chat)
        samples = sum(len(s.prompts) for s in sets) * config.evaluation.samples
        check_sandboxes(config, min(samples, evaluation_concurrency(config, endpoint is not None)))
        folder = Path(args.output or Path(config.run.directory) / config.run.name / "evaluation")
        with open_results(folder, identity(config, endpoint), sets, config.evaluation.samples) as results:
            console.log_to(folder / "logs" / "evaluate.log")

            from skyrl_mega.cluster.errors import ActorFailed, ClusterError
            from skyrl_mega.evaluate.endpoint import EndpointFailed

            try:
                _sample_missing(config, sets, results, endpoint, chat, console)
            except (ActorFailed, ClusterError, EndpointFailed) as error:
                console.say(f"fault: {error}")
                console.say(f"  logs  {folder / 'logs'}; {RESUME_HINT}")
                return FAULT
            published = {"auto": matching_tables([s.name for s in sets]), "none": []}.get(
                args.published, [args.published]
            )
            _score(config, sets, results, endpoint, published=published, as_json=args.json, console=console)
    return DONE


def _check_tools(config: Config, sets: list[PromptSet], chat: Renderer | None) -> None:
    """Raises a UserError if an environment offers tools but the model's chat template is unavailable or cannot show
    tools, or if an environment runs an agent without engines of the run."""
    from skyrl_mega.envs import registry
    from skyrl_mega.envs.agent import AgentEnv

    for name in sorted({p.env_class for s in sets for p in s.prompts}):
        tools = registry.has_tools(name, config.environment)
        if chat is not None:
            if tools:
                chat.check_tools(name)
            continue
        if issubclass(registry.resolve(name, config.environment), AgentEnv):
            what = "runs an agent, which asks an engine of the run"
        elif tools:
            what = "has tools, which are called in the model's own chat template"
        else:
            continue
        raise UserError(f"environment {name} {what}; evaluate without --endpoint", key="--endpoint")


def _endpoint(args: argparse.Namespace) -> Endpoint | None:
    if args.endpoint is None:
        for name in ("served_model", "request"):
            value = getattr(args, name)
            if value not in (None, "{}"):
                raise UserError(
                    "it needs --endpoint",
                    key=f"--{name.replace('_', '-')}",
                    value=value,
                    fix="give --endpoint, or drop the option",
                )
        return None
    from skyrl_mega.evaluate.endpoint import Endpoint

    variable = args.api_key_variable
    return Endpoint.of(args.endpoint, args.served_model, variable, os.environ.get(variable), args.request)


def _sample_missing(
    config: Config,
    sets: list[PromptSet],
    results: Results,
    endpoint: Endpoint | None,
    chat: Renderer | None,
    console: Console,
) -> None:
    """Samples the missing answers; starts nothing if all answers exist."""
    from skyrl_mega.envs import registry
    from skyrl_mega.envs.sandbox import budget
    from skyrl_mega.evaluate.sampling import sample_missing
    from skyrl_mega.evaluate.sets import sample_tasks
    from skyrl_mega.retriever.session import running_service

    samples = config.evaluation.samples
    missing = results.missing(sample_tasks(sets, samples, config.run.seed))
    total = sum(len(s.prompts) for s in sets) * samples
    existing = total - len(missing)
    console.say(
        f"{len(sets)} set{'s' if len(sets) > 1 else ''}, {total} sample{'s' if total > 1 else ''}; "
        f"{existing} {'is' if existing == 1 else 'are'} already answered"
    )
    if not missing:
        return

    @cache
    def metrics(env_class: str) -> tuple[str, ...]:
        return tuple(getattr(registry.resolve(env_class, config.environment), "metrics", ()))

    with running_service(config.environment, results.folder / "logs", console.say) as environment:
        config = replace(config, environment=environment)
        with (
            _source(config, endpoint, chat, results.folder, console) as source,
            console.phase("evaluate", total=len(missing)) as progress,
        ):
            sample_missing(source, missing, results, metrics, progress.update, console.say)
    if ended := budget.ended():
        console.say(f"{budget.memory_warning(ended)}; they count as programs that failed")


def _source(
    config: Config, endpoint: Endpoint | None, chat: Renderer | None, folder: Path, console: Console
) -> AbstractContextManager[AnswerSource]:
    """Returns a context manager of the source of answers: the endpoint, or engines that run within the block."""
    if endpoint is not None:
        from skyrl_mega.evaluate.endpoint import EndpointSource

        return nullcontext(EndpointSource(endpoint, config))
    from skyrl_mega.evaluate.engines import own_engines

    assert chat is not None
    return own_engines(config, chat, folder, console)


def _score(
    config: Config,
    sets: list[PromptSet],
    results: Results,
    endpoint: Endpoint | None,
    *,
    published: list[str],
    as_json: bool,
    console: Console,
) -> None:
    """Writes `<set>.parquet`, `scores.json` and `table.md`, and prints the tables."""
    from skyrl_mega.config.derived import evaluation_sampling
    from skyrl_mega.evaluate.report import report, values
    from skyrl_mega.evaluate.scores import set_scores

    with console.phase("write parquet"):
        results.write_parquet()
    scores = [set_scores(s.name, results.samples[s.name], s.left_out) for s in sets]
    drawn, rollout = evaluation_sampling(config), config.rollout
    model = f"{endpoint.model} at {endpoint.url}" if endpoint else config.model.path
    about = (
        f"{model}: {config.evaluation.samples} samples of an example, temperature {drawn.temperature:g}, top-p "
        f"{drawn.top_p:g}, at most {rollout.max_turns} turns of {drawn.max_tokens} tokens, seed {config.run.seed}"
    )
    figures = {"about": about, "model": model, **values(scores, published)}
    text = report(scores, published, about)
    written = json.dumps(figures, indent=2, ensure_ascii=False) + "\n"
    write_whole(results.folder / "scores.json", written.encode())
    write_whole(results.folder / "table.md", text.encode())
    console.say(f"\n{text}")
    console.say(f"results  {results.folder}")
    command = f"python -m skyrl_mega.report trajectories {results.folder} --html samples.html"
    console.say(f"samples  {command}")
    if as_json:
        print(json.dumps(figures), flush=True)
    if not any(s.scores for s in scores):
        raise UserError(
            "the environments of all samples failed, so there are no scores",
            key="--output",
            value=results.folder,
            fix="read the errors in the samples' metadata, fix the environments or the services behind them, and give "
            "another --output",
        )
