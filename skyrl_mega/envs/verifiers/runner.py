"""Runner of an environment of `verifiers` (Prime Intellect's hub): checks it, lists its tasks, or plays a task.

Executed by the interpreter of the environment's own installation, `python runner.py check|tasks|play`, so this file
imports only the standard library and, when called, `verifiers`. The order is JSON from the file `SKYRL_TASK`, else from
standard input; the result is one line of JSON on standard output. Everything that the environment prints goes to
standard error.

Two kinds of package: `load_environment(**args)` of verifiers 0.1.10 to 0.3 (`Classic`), and a task set with agents, of
verifiers 0.4 (`TaskSet`).
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

TASK = "SKYRL_TASK"
"""Variable with the path of the order's file."""
OWN = "SKYRL_OWN_"
"""Prefix of variables meant for the environment: names such as OPENAI_API_KEY belong to the policy."""
POLICY = (
    "OPENAI_BASE_URL",
    "OPENAI_API_BASE",
    "OPENAI_API_KEY",
    "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_KEY",
    "MODEL_NAME",
)
"""Variables of the policy's endpoint, taken away before the environment starts: a judge's SDK would find the policy."""
KEY = "SKYRL_POLICY_API_KEY"
"""Variable with the policy's key; verifiers keeps variables with API_KEY in the name from programs on this machine."""
OPENING = "(The environment opens the conversation.)"
"""Shown prompt of a task without a prompt."""
HELD_OUT = 5
"""Most tests are a fifth of the tasks, if the environment has fewer tasks than requested."""
UNSOUND = ("SandboxError", "BrowserSandboxError", "TunnelError", "InterceptionError", "InfraError")
"""Errors of services below the environment."""
EMPTY = ("EmptyModelResponseError", "InvalidModelResponseError")
"""Errors for a reply without text: the policy's own failure, judged as any other reply."""


class Unfit(Exception):
    """The environment cannot be used for training; the text names the cause and the remedy."""


class Classic:
    """An environment of verifiers up to 0.3: a package with `load_environment`.

    Args:
        order: The order.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.vf: Any = importlib.import_module("verifiers")
        if not hasattr(self.vf, "load_environment"):
            raise Unfit(f"its load_environment needs an earlier verifiers than {_version()}; install verifiers<0.4")
        self.env: Any = self.vf.load_environment(_plain_name(order["env"]), **order["args"])
        if getattr(self.env, "requires_group_rollouts", False):
            raise Unfit("its rewards compare the answers of a group; a trajectory is judged alone")
        if not hasattr(self.env, "run_rollout") or not hasattr(self._types(), "ClientConfig"):
            raise Unfit(f"verifiers {_version()} is too old; install 0.1.10 or later")

    def _types(self) -> Any:
        return importlib.import_module("verifiers.types")

    def tasks(self, train: int, test: int) -> dict[str, list[dict[str, Any]]]:
        """Returns `train` and `test` → records with `prompt` and `task`; the tests are the environment's evaluation
        data, if any, else the records after the training records. Raises Unfit without training data."""
        env = self.env
        if env.dataset is None and getattr(env, "dataset_source", None) is None:
            raise Unfit("it has no training data")
        if env.eval_dataset is None and getattr(env, "eval_dataset_source", None) is None:
            return split(self._records(env.get_dataset(n=train + test)), train, test)
        held_out = self._records(env.get_eval_dataset(n=test)) if test else []
        return {"train": self._records(env.get_dataset(n=train)), "test": held_out}

    def _records(self, dataset: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{"prompt": messages(row.get("prompt")), "task": dict(row)} for row in dataset]

    async def play(self, order: Mapping[str, Any], url: str, model: str) -> dict[str, Any]:
        """Plays a task and returns the result: `reward` (0 if the environment gives none), `metrics` (name → number)
        and `notes`; after an error of the environment the result of `failure`, with `notes`. `notes` has `stop`, the
        reason of the end, and `cut`, True for a rollout that was cut off. A reply of the policy without text is no
        error.

        Args:
            order: The order, with `task`; `timeout_s`, the limit of a request to the policy, which has two retries; and
                `max_turns`, which replaces a higher or missing limit in the environment, for later tasks too.
            url: Address of the policy, without a path.
            model: Model name for requests.
        """
        turns = getattr(self.env, "max_turns", None)
        if isinstance(turns, int):
            self.env.max_turns = min(turns, order["max_turns"]) if turns > 0 else order["max_turns"]
        client = self._types().ClientConfig(
            api_key_var=KEY, api_base_url=f"{url}/v1", timeout=order["timeout_s"], max_retries=2
        )
        output = await self.env.run_rollout(order["task"], client, model, {})
        error = output.get("error")
        notes = {"stop": output.get("stop_condition"), "cut": bool(output.get("is_truncated"))}
        kind = error["error"] if isinstance(error, Mapping) else type(error).__name__ if error else None
        if kind is not None and kind not in EMPTY:
            text = error["error_chain_str"] if isinstance(error, Mapping) else str(error)
            return failure(kind, text) | {"notes": notes}
        return {"reward": output.get("reward") or 0.0, "metrics": dict(output.get("metrics") or {}), "notes": notes}


class TaskSet:
    """An environment of verifiers 0.4: a package with a task set, played by agents of verifiers.

    Args:
        order: The order. Its `args` are the environment's configuration (`--env.…` of verifiers' own command).
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.vf: Any = importlib.import_module("verifiers.v1")
        if not hasattr(self.vf, "env_config_type"):
            raise Unfit(f"verifiers {_version()} is too old for a task set; install 0.4 or later")
        self.env: Any = self.vf.load_environment(self.vf.resolve_env_config(self._config(order)))
        self.task_type: Any = type(self.env.taskset).task_type()
        unwritten = [name for name, field in self.task_type.data_type().model_fields.items() if field.exclude]
        if unwritten:
            raise Unfit(f"its tasks cannot be written to a file: {', '.join(unwritten)} is excluded")
        if order["confined"] is not None:  # None: the tasks are only listed, and no agent runs
            self._refuse_places(order["confined"])
        use_own_interpreter()

    def _config(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the environment's configuration: the user's, completed by a process on this machine and the limits of
        the run."""
        config = dict(order["args"])
        config["taskset"] = {**(config.get("taskset") or {}), "id": order["env"]}
        wanted = (order.get("task") or {}).get("timeout") or {}
        for name, field in self.vf.env_config_type(order["env"], config.get("id") or "").model_fields.items():
            if not isinstance(field.default, self.vf.AgentConfig):
                continue
            agent, preset = dict(config.get(name) or {}), field.default.model_fields_set
            if "runtime" not in preset:
                agent.setdefault("runtime", {"type": "subprocess"})
            if "max_turns" not in preset:
                agent.setdefault("max_turns", order["max_turns"])
            if "timeout" not in preset:
                agent.setdefault("timeout", {"rollout": min(order["timeout_s"], wanted.get("agent") or math.inf)})
            config[name] = agent
        return config

    def _refuse_places(self, confined: bool) -> None:
        """Raises Unfit for an agent with a shell on this machine outside a sandbox, or with a container or a remote
        machine, unreachable from a sandbox."""
        for name, harness in self.env.config.agent_harnesses().items():
            place = getattr(self.env.config, name).runtime.type
            if confined and place != "subprocess":
                raise Unfit(f"agent {name} runs in {place}, out of the sandbox's reach; give confined: false")
            if not confined and place == "subprocess" and self.vf.load_harness(harness).EXECUTES_CODE:
                raise Unfit(
                    f"agent {name} ({harness.id}) runs the policy's commands on this machine; give confined: true, a "
                    f"runtime (args: {{{name}: {{runtime: {{type: docker}}}}}}), or the harness null"
                )

    def tasks(self, train: int, test: int) -> dict[str, list[dict[str, Any]]]:
        """Returns `train` and `test` → records with `prompt` and `task`: the first tasks, and the next tasks; with too
        few tasks as `split` divides them."""
        tasks = list(itertools.islice(iter(self.env.taskset), train + test))
        return split(
            [self._record(task.data.model_dump(mode="json", exclude_none=True)) for task in tasks], train, test
        )

    def _record(self, data: dict[str, Any]) -> dict[str, Any]:
        system = data.get("system_prompt")
        first = [{"role": "system", "content": system}] if system else []
        return {"prompt": [*first, *messages(data.get("prompt"))], "task": data}

    async def play(self, order: Mapping[str, Any], url: str, model: str) -> dict[str, Any]:
        """Plays a task and returns the result: `reward`, the mean of all trained agents, `metrics` with the mean of
        every reward and metric, and `notes`; after an error the result of `failure`. `notes` has `stop`, the reason of
        each agent's end, and `cut`, True if one of the agents was cut off.

        Args:
            order: The order, with `task`.
            url: Address of the policy, without a path.
            model: Model name for requests.
        """
        vf = self.vf
        task = self.task_type(self.task_type.data_type().model_validate(order["task"]), self.env.config.taskset.task)
        client = vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var=KEY)
        context = vf.ModelContext(model=model, client=client, sampling=vf.SamplingConfig())
        async with self.env.serving():
            episode = await self.env.run_episode(task, context)
        for trace in episode.traces:
            if not trace.agent.trainable and trace.calls and trace.agent.config.client.base_url == client.base_url:
                name = trace.agent.name
                return failure(
                    "Unfit", f"agent {name} is not to be trained, yet plays as the policy; give args.{name}.client"
                )
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        notes = {
            "stop": [trace.stop_condition for trace in trained],
            "cut": any(trace.is_truncated for trace in trained),
        }
        errors = [
            *episode.errors[-1:],
            *(trace.errors[-1] for trace in episode.traces if not trace.ok and trace.errors),
        ]
        if not episode.ok or not trained:
            error = errors[0] if errors else None
            problem = failure(error.type, error.message) if error else failure("EnvError", "no agent was trained")
            return problem | {"notes": notes}
        figures = [
            {**{name: reward.score for name, reward in trace.rewards.items() if reward}, **trace.metrics}
            for trace in trained
        ]
        return {"reward": mean(trace.reward for trace in trained), "metrics": means(figures), "notes": notes}


def load(order: Mapping[str, Any]) -> Classic | TaskSet:
    """Imports and returns the environment of an order, by the kind of its package. Raises Unfit if the environment
    cannot be used here, and ImportError if a package is missing."""
    name = _plain_name(order["env"]).replace("-", "_")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # the package is there, and lacks another one
            raise
    else:
        if hasattr(module, "load_environment"):
            return Classic(order)
    return TaskSet(order)


def use_own_interpreter() -> None:
    """Changes verifiers in this process: scripts of its agents run with this interpreter, if all packages of the script
    are installed.

    Otherwise verifiers calls `uv`, which downloads the packages of the script into each new home folder.
    """
    runtime: Any = importlib.import_module("verifiers.v1.runtimes.subprocess").SubprocessRuntime
    with_uv = runtime.prepare_uv_script

    async def prepare(self: Any, script: str | bytes, env: Any = None, *, activate: bool = True) -> list[str]:
        text = script.decode() if isinstance(script, bytes) else script
        if not has_packages(text):
            return list(await with_uv(self, script, env, activate=activate))
        path = f".script-{abs(hash(text)):x}.py"
        await self.write(path, text.encode())
        return [sys.executable, path]

    runtime.prepare_uv_script = prepare


def has_packages(script: str) -> bool:
    """Returns True if all packages in a script's header (PEP 723) are installed, in the requested versions; also
    without a header.

    Args:
        script: The script's text.
    """
    import tomllib  # Python 3.11, as verifiers 0.4 itself

    from packaging.requirements import Requirement

    header = re.search(r"^# /// script$(.*?)^# ///$", script, re.MULTILINE | re.DOTALL)
    settings = tomllib.loads(re.sub(r"^# ?", "", header[1], flags=re.MULTILINE)) if header else {}
    for text in settings.get("dependencies", ()):
        wanted = Requirement(text)
        try:
            if not wanted.specifier.contains(importlib.metadata.version(wanted.name), prereleases=True):
                return False
        except importlib.metadata.PackageNotFoundError:
            return False
    return True


def split(records: list[dict[str, Any]], train: int, test: int) -> dict[str, list[dict[str, Any]]]:
    """Returns `train` → the first `train` records, `test` → the next `test` records; drops all later records. With
    fewer than `train` + `test` records, `test` gets at most `len(records) // HELD_OUT` of them, perhaps none, and
    `train` at most the others."""
    if len(records) < train + test:
        test = min(test, len(records) // HELD_OUT)
        train = min(train, len(records) - test)
    return {"train": records[:train], "test": records[train : train + test]}


def messages(prompt: Any) -> list[dict[str, str]]:
    """Returns a prompt as messages of plain text, for people; the agent decides about the policy's messages. A text
    becomes a user's message, an empty prompt the user's message `OPENING`, and a part without text `[type]`."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    shown = [{"role": str(m.get("role")), "content": _text(m.get("content"))} for m in prompt or ()]
    return shown or [{"role": "user", "content": OPENING}]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text") or f"[{part.get('type')}]") for part in content or ())


def mean(values: Iterable[float]) -> float:
    """Returns the mean; 0 without a value."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def means(figures: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Returns name → mean over the mappings with a value for this name; None is no value, and a name without any has
    mean 0."""
    names = sorted({name for given in figures for name in given})
    return {name: mean(v for given in figures if (v := given.get(name)) is not None) for name in names}


def failure(kind: str, text: str) -> dict[str, Any]:
    """Returns the result of a failed rollout: `error` with `kind`, `text` (the last 2,000 characters) and
    `infrastructure`, True for a failure of a service below the environment.

    Args:
        kind: Name of the error's class.
        text: The error.
    """
    return {"error": {"kind": kind, "text": text[-2000:], "infrastructure": kind in UNSOUND}}


def _plain_name(env: str) -> str:
    """Returns the package of `owner/name@version`."""
    return env.rpartition("/")[2].partition("@")[0]


def _version() -> str:
    return importlib.metadata.version("verifiers")


def answer(command: str, order: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the result of a command: for `check` `kind` and `verifiers` (its version), for `tasks` and `play` the
    result of the method of `Classic` or `TaskSet`. An error of the environment is a result too (`failure`).

    Changes the environment variables of this process: `play` takes the policy's away, and `OWN` is removed from the
    environment's own.

    Args:
        command: `check`, `tasks` or `play`.
        order: The order.
    """
    url, key, model = (os.environ.get(name, "") for name in ("ANTHROPIC_BASE_URL", "OPENAI_API_KEY", "MODEL_NAME"))
    for name in POLICY if command == "play" else ():
        os.environ.pop(name, None)
    os.environ |= {name.removeprefix(OWN): value for name, value in os.environ.items() if name.startswith(OWN)}
    os.environ[KEY] = key
    try:
        environment = load(order)
        if command == "play":
            return asyncio.run(environment.play(order, url, model))
        if command == "tasks":
            return environment.tasks(order["train"], order["test"])
        return {"kind": type(environment).__name__, "verifiers": _version()}
    except Unfit as error:
        return failure("Unfit", str(error))
    except Exception as error:  # the environment's own code, of any kind
        traceback.print_exc()
        return failure(type(error).__name__, str(error))


def main() -> None:
    """Reads the order from the file in `SKYRL_TASK`, which is deleted, or from standard input, and prints the result of
    the command `sys.argv[1]` as a line of JSON. Other output of this process goes to standard error."""
    sys.path = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    result = os.dup(1)
    os.dup2(2, 1)
    path = os.environ.pop(TASK, None)
    if path is None:
        order = json.load(sys.stdin)
    else:
        with open(path, encoding="utf-8") as file:
            order = json.load(file)
        os.unlink(path)  # it has the answer; the policy may have a shell in this folder
    line = json.dumps(answer(sys.argv[1], order), default=str)
    with os.fdopen(result, "w", encoding="utf-8") as out:
        out.write(line + "\n")


if __name__ == "__main__":
    main()
