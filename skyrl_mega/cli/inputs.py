"""Inputs of a run, checked before any process starts: model, data, code, servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skyrl_mega.algorithms import advantages, losses
from skyrl_mega.cli.agent_checks import check_agents
from skyrl_mega.cli.draft_checks import check_draft_weights, check_suffix
from skyrl_mega.cli.experts import check_experts
from skyrl_mega.cli.layout_checks import check_layouts
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks.devices import check_enough
from skyrl_mega.config.refusals import raising
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.fields import Refusals
from skyrl_mega.data.rows import check_files, environments_of, load_demonstrations
from skyrl_mega.engines.external.open import check_servers
from skyrl_mega.envs import registry
from skyrl_mega.hf_checkpoint import index
from skyrl_mega.hf_checkpoint.copied import unread_note
from skyrl_mega.models.published import KNOWN, hub_name, known
from skyrl_mega.models.registry import architecture
from skyrl_mega.preflight import run_inputs
from skyrl_mega.telemetry.trackers import registry as trackers
from skyrl_mega.weights.files.store import SCHEME, open_store


def check_inputs(config: Config, say: Callable[[str], None] = lambda line: None) -> Mapping[str, Any]:
    """Checks all inputs of a run, without building or starting anything. Does not check devices and memory.

    Covers trackers, advantage estimator and loss, environments, models, parallel layouts, every row of the data files,
    chat template and tools. A missing data file is an error unless `data.prepare` will create it. The servers of
    `rollout.endpoints` must answer.

    Args:
        config: The settings.
        say: Called with messages about data rows in which no answer earns a reward, and tensors that nothing reads.

    Returns:
        The model's config.json: of `model.path`, or as `model.build` will write it.

    Raises:
        UserError: An input is missing or invalid; the message is one line.
    """
    trackers.check_ready(config.telemetry)
    advantages.check(config.algorithm)
    losses.check(config.algorithm, config.asynchrony)
    registry.check(config.environment)
    check_store(config)
    check_own_code(config)
    run_inputs.check_present(config)
    check_rewriting(config)
    hf = model_config(config)
    _note_unread(config, hf, say)
    check_build(config, hf)
    check_experts(config, hf)
    check_layouts(config, hf)
    check_suffix(config)
    check_draft_weights(config, hf)
    for other in filter(None, (config.reference.path, config.critic.path)):
        index.check_files(Path(other))
    _check_preparation(config)
    _check_waits(config)
    check_data(config, say, missing_ok=config.data.prepare is not None)
    check_chat(config, hf)
    check_tools(config)
    check_agents(config, environment_names(config))
    if config.rollout.endpoints:
        decoder = architecture(hf).describe(hf)
        check_servers(config, decoder.vocab, decoder.experts is not None)
    return hf


def planned_inputs(
    config: Config, say: Callable[[str], None] = lambda line: None
) -> tuple[Mapping[str, Any], list[str]]:
    """Checks the inputs of a dry run: existing files are checked, absent files are listed. With `data.prepare`, absent
    data files are not listed.

    Unlike `check_inputs`, checks neither parallel layouts (`check_layouts`) nor `check_rewriting`.

    Args:
        config: The settings.
        say: Called with messages about data rows in which no answer earns a reward, and tensors that nothing reads.

    Returns:
        The model's config.json, or a known model's if `model.path` is absent; and the absent paths.

    Raises:
        UserError: An input is invalid, or an absent `model.path` does not end in the name of a known model; the message
            is one line.
    """
    trackers.check(config.telemetry)
    advantages.check(config.algorithm)
    losses.check(config.algorithm, config.asynchrony)
    registry.check(config.environment)
    check_own_code(config)
    absent: list[str] = []
    path = Path(config.model.path)
    if path.exists() and not any(path.glob("*.safetensors")):
        hf: Mapping[str, Any] = index.read_config(path)
        absent.append(f"{path}/*.safetensors")
    elif path.exists() or config.model.build:
        hf = model_config(config)
        _note_unread(config, hf, say)
        check_build(config, hf)
    else:
        hf = _known(path)
        absent.append(str(path))
    check_experts(config, hf)
    for other in map(Path, filter(None, (config.reference.path, config.critic.path))):
        if other.exists():
            index.check_files(other)
        else:
            absent.append(str(other))
    absent += check_draft_weights(config, hf, planned=True)
    if not config.data.prepare:
        absent += [file for file in data_files(config) if not Path(file).exists()]
    _check_preparation(config)
    _check_waits(config)
    check_data(config, say, missing_ok=True)
    check_chat(config, hf)
    check_tools(config)
    check_agents(config, environment_names(config))
    return hf, absent


def check_store(config: Config) -> None:
    """Raises UserError if fsspec cannot open the address of the weight files here; does not connect."""
    if SCHEME in config.weights.files.folder:
        open_store(config.weights.files.folder)


def check_own_code(config: Config) -> None:
    """Tries a generator (`rollout.generator`) and an order of a step (`run.loop`) of the user with stand-ins; does
    nothing without either.

    Raises:
        UserError: The code cannot be loaded, or fails.
    """
    if config.rollout.generator is not None:
        from skyrl_mega.rollout.generators import trial  # the agent loop, which other checks do without

        trial.check(config)
    if config.run.loop is not None:
        from skyrl_mega.trainer import plan_trial

        plan_trial.check(config)


def check_chat(config: Config, hf: Mapping[str, Any]) -> None:
    """Checks tokenizer, chat template, turn-ending tokens, and the tool calls of demonstrations with this template.

    Does nothing if the folder of the model has no tokenizer. Demonstrations are read only with `warmup.steps`, and only
    from files that exist.

    Args:
        config: The settings.
        hf: The model's config.json.

    Raises:
        UserError: The tokenizer or the template cannot be used, a file of demonstrations is wrong, or the template
            cannot write a demonstration's tool calls.
    """
    path = Path(config.model.path)
    if not any(path.glob("tokenizer*")):
        return
    from skyrl_mega.rollout.agent.renderer import Renderer

    chat = Renderer(str(path), config.rollout)
    chat.check_vocabulary(architecture(hf).describe(hf).vocab)
    files = [file for file in config.warmup.files if Path(file).exists()] if config.warmup.steps else []
    for message in (turn for demonstration in load_demonstrations(files) for turn in demonstration.turns):
        if message.get("tool_calls"):
            chat.turn(message)


def check_tools(config: Config) -> None:
    """Checks that the model's chat template can show the tools of the environments in settings and data rows.

    Call after the data files have passed `check_files`: a damaged file raises an error of pyarrow. Files that do not
    exist are left out. Does nothing without tools; without a tokenizer in the model's folder, only
    `rollout.conversation` is checked.

    Raises:
        UserError: The template cannot show tools, `rollout.conversation=one_message` forbids them, an environment
            cannot be found or imported, or the tokenizer cannot be used.
    """
    path = Path(config.model.path)
    names = [name for name in environment_names(config) if registry.has_tools(name, config.environment)]
    if not names:
        return
    from skyrl_mega.rollout.agent.renderer import Renderer, one_message_refused

    if config.rollout.conversation == "one_message":
        raise UserError(one_message_refused(names[0]))
    if any(path.glob("tokenizer*")):
        chat = Renderer(str(path), config.rollout)
        for name in names:
            chat.check_tools(name)


def environment_names(config: Config) -> list[str]:
    """Returns the environments named in the settings and in existing data files, each once. Call after the data files
    have passed `check_files`: a damaged file raises an error of pyarrow."""
    environments = config.environment
    files = [file for file in (*config.data.train, *config.data.eval) if Path(file).exists()]
    named = (*environments.classes, *filter(None, [environments.default_name]), *environments_of(files, environments))
    return list(dict.fromkeys(named))


def _check_preparation(config: Config) -> None:
    if config.data.prepare:
        from skyrl_mega.data.prepare import check

        try:
            check(config.data.prepare)
        except UserError as error:
            raise UserError(error, key="data.prepare") from error


@raising
def _check_waits(config: Config) -> Refusals:
    """Raises a UserError if an environment's internal time limits allow a step as long as `rollout.env_timeout_s`,
    which would void the trajectory."""
    for name in dict.fromkeys([*config.environment.options, *filter(None, [config.environment.default_name])]):
        longest = getattr(registry.resolve(name, config.environment), "longest_step_s", None)
        seconds = longest(registry.check_options(name, config.environment)) if longest else 0.0
        if seconds >= config.rollout.env_timeout_s:
            why = f"a step of environment {name} may take {seconds:g} s by its own time limits"
            fix = f"allowed is more than that, or lower environment.options.{name}'s timeouts"
            yield "rollout.env_timeout_s", why, fix


def _known(path: Path) -> Mapping[str, Any]:
    """Returns the sizes of a published model absent from this machine."""
    if hub_name(path) is None:
        raise UserError(
            "it is not here, and its name ends in none of the models that a dry run knows: "
            f"{', '.join(name.partition('/')[2] for name in KNOWN)}; give a Hugging Face "
            "directory (config.json is enough for a dry run) or one of these",
            key="model.path",
            value=path,
        )
    return known(path)


def model_config(config: Config) -> Mapping[str, Any]:
    """Returns the model's config.json: of `model.path`, or as `model.build` will write it if the path is absent.

    Also checks the weight files of an existing model.

    Raises:
        UserError: The model is missing or its files are damaged.
    """
    hf, path = run_inputs.model_config(config), Path(config.model.path)
    if path.exists():
        index.check_files(path, hf)
    return hf


def _note_unread(config: Config, hf: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Says which tensors of `model.path` stay unread, if any."""
    if note := unread_note(Path(config.model.path), hf):
        say(f"model.path: {note}")


def check_build(config: Config, hf: Mapping[str, Any]) -> None:
    """Checks that an existing model has the sizes in `model.build`; does nothing if `model.build` is null.

    A run builds only a missing model, and would otherwise ignore `model.build`.

    Args:
        config: The settings.
        hf: Result of `model_config`; a missing model therefore passes.

    Raises:
        UserError: The model differs; names the setting, both values and the path.
    """
    if config.model.build is None:
        return
    from skyrl_mega.models.tiny import KEYS, hf_config

    asked = hf_config(config.model.build)
    for name, key in KEYS.items():
        if key in asked and key in hf and hf[key] != asked[key]:
            raise UserError(
                f"{config.model.path} is there already and has {hf[key]} ({key} in its config.json)",
                key=f"model.build.{name}",
                value=asked[key],
                fix="remove that folder, name another model.path, or give model.build=null",
            )
    if architecture(asked).describe(asked) != architecture(hf).describe(hf):
        raise UserError(
            f"{config.model.path} is there already, and its config.json describes another model",
            key="model.build",
            fix="remove that folder, name another model.path, or give model.build=null",
        )


@raising
def check_rewriting(config: Config) -> Refusals:
    """Rejects environments that replace earlier messages (`rewrites_history`) if `rollout.step_wise` is off; otherwise
    does nothing. Checks `environment.classes` and `environment.default_name`, not other names in the data.

    Raises:
        UserError: A trajectory of such an environment would be no single sequence of tokens, or an environment cannot
            be found or imported.
    """
    if config.rollout.step_wise != "off":
        return
    for name in filter(None, [*config.environment.classes, config.environment.default_name]):
        if getattr(registry.resolve(name, config.environment), "rewrites_history", False):
            why = f"environment {name} rewrites the conversation between turns, so that a trajectory is no single"
            yield "rollout.step_wise", f"{why} sequence; allowed is turns or merged"


def data_files(config: Config) -> list[str]:
    """Returns the files of prompts and demonstrations named in the settings."""
    return [file for files in run_inputs.data_files(config).values() for file in files]


def check_data(config: Config, say: Callable[[str], None], missing_ok: bool) -> None:
    """Checks every row of the prompt and demonstration files, and that the prompts suffice for a step. Demonstrations
    are read only with `warmup.steps`.

    Args:
        config: The settings.
        say: Called with messages about rows in which no answer earns a reward.
        missing_ok: True to leave out absent files; the number of prompts is then checked only if no file of
            `data.train` is absent.

    Raises:
        UserError: A file, column or row is wrong, no answer can earn the reward of too many rows, a step needs more
            prompts than all epochs have, or no row uses `environment.reward_function`.
    """

    def present(files: list[str]) -> list[str]:
        return [file for file in files if not missing_ok or Path(file).exists()]

    train = present(config.data.train)
    rows = check_files(train, config.environment, key="data.train", say=say)
    if len(train) == len(config.data.train):
        check_enough(config, rows, "rows in data.train")
    evaluated = present(config.data.eval)
    check_files(evaluated, config.environment, key="data.eval", say=say)
    registry.check_reward_function(config.environment, environments_of([*train, *evaluated], config.environment))
    if config.warmup.steps:
        load_demonstrations(present(config.warmup.files))
