"""A virtual environment with stand-ins of `verifiers` and of two environments, as small as the runner's needs."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

FILES = {
    "verifiers-0.3.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: verifiers\nVersion: 0.3.9\n",
    "verifiers/__init__.py": """
import importlib

def load_environment(name, **args):
    return importlib.import_module(name.replace("-", "_")).load_environment(**args)
""",
    "verifiers/types.py": """
class ClientConfig:
    def __init__(self, **given):
        self.__dict__.update(given)
""",
    "asking.py": """
import json, os, urllib.request

def ask(url, key, model, messages):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    body = json.dumps({"model": model, "messages": messages}).encode()
    request = urllib.request.Request(url + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]["content"]
""",
    "my_sums.py": """
import os
from asking import ask

class Sums:
    def __init__(self, numbers, held_out, fails, group):
        self.max_turns, self.requires_group_rollouts, self.fails = -1, group, fails
        rows = [{"prompt": [{"role": "user", "content": f"{n}+{n}"}], "answer": str(2 * n)} for n in range(numbers)]
        self.dataset = rows
        self.eval_dataset = rows[:held_out] if held_out else None

    def get_dataset(self, n):
        return self.dataset[:n]

    def get_eval_dataset(self, n):
        return self.eval_dataset[:n]

    async def run_rollout(self, row, client, model, sampling_args):
        print("noise of the environment")
        folder = sorted(os.listdir("."))
        reply = ask(client.api_base_url, os.environ[client.api_key_var], model, row["prompt"])
        figures = {"files": len(folder), "turns": self.max_turns, "policy": "OPENAI_BASE_URL" in os.environ}
        figures["own"] = os.environ.get("OPENAI_API_KEY") == "mine"
        error = self.fails and {"error": self.fails, "error_chain_str": "it broke"}
        return {"reward": float(reply == row["answer"]), "metrics": figures, "error": error, "is_truncated": False}

def load_environment(numbers=10, held_out=0, fails=None, group=False):
    return Sums(numbers, held_out, fails, group)
""",
    "verifiers/v1/runtimes/subprocess.py": """
class SubprocessRuntime:
    async def prepare_uv_script(self, script, env=None, *, activate=True):
        return ["uv"]

    async def write(self, path, data):
        self.written = (path, data)
""",
    "verifiers/v1/__init__.py": """
import importlib, os
from types import SimpleNamespace as Space

class AgentConfig:
    def __init__(self, **given):
        self.model_fields_set = set(given)
        self.harness, self.client, self.max_turns = "bash", None, None
        self.__dict__.update(given)
        self.runtime = Space(**(given.get("runtime") or {"type": "prime"}))

class Config:
    model_fields = {"solver": Space(default=AgentConfig()), "judge": Space(default=AgentConfig(max_turns=1))}

    def __init__(self, given):
        self.taskset = Space(task=None, **given["taskset"])
        for name, field in self.model_fields.items():
            setattr(self, name, AgentConfig(**given.get(name, {})))

    def agent_harnesses(self):
        return {name: Space(id=getattr(self, name).harness) for name in self.model_fields}

class Data:
    model_fields = {}

    def __init__(self, **given):
        self.given = given

    def model_dump(self, **_):
        return self.given

    @classmethod
    def model_validate(cls, given):
        return cls(**given)

class Task:
    def __init__(self, data, config=None):
        self.data = data

    @classmethod
    def data_type(cls):
        return Data

SamplingConfig = EvalClientConfig = ModelContext = Space

def env_config_type(taskset, env):
    importlib.import_module(taskset.rpartition("/")[2].partition("@")[0].replace("-", "_"))
    return Config

resolve_env_config = Config

def load_harness(harness):
    return Space(EXECUTES_CODE=harness.id != "null")

def load_environment(config):
    return importlib.import_module("my_tasks").Environment(config)
""",
    "my_tasks.py": """
import os
from contextlib import asynccontextmanager
from types import SimpleNamespace as Space
from asking import ask
from verifiers import v1 as vf

class Tasks:
    @classmethod
    def task_type(cls):
        return vf.Task

    def __iter__(self):
        for n in range(10**9):
            yield vf.Task(vf.Data(idx=n, prompt=f"{n}+{n}", system_prompt="Add.", answer=str(2 * n)))

class Environment:
    def __init__(self, config):
        self.config, self.taskset = config, Tasks()

    @asynccontextmanager
    async def serving(self):
        yield

    async def run_episode(self, task, context):
        client, given = context.client, task.data.given
        messages = [{"role": "user", "content": given["prompt"]}]
        reply = ask(client.base_url, os.environ[client.api_key_var], context.model, messages)
        turns, kind = self.config.solver.max_turns, self.config.taskset.__dict__.get("fails")
        own = Space(base_url="http://elsewhere") if self.config.taskset.__dict__.get("apart", True) else client
        def trace(name, value, trainable=True, client=client):
            agent = Space(name=name, trainable=trainable, config=Space(client=client))
            rewards = {"right": Space(score=value), "skipped": None}
            errors = [Space(type=kind, message="it broke")] if kind else []
            return Space(agent=agent, calls=[1], ok=not kind, reward=value, rewards=rewards, metrics={"turns": turns},
                         errors=errors, stop_condition="done", is_truncated=False)
        right = float(reply == given["answer"])
        traces = [trace("solver", right), trace("solver", 0.0), trace("judge", 0.0, False, own)]
        return Space(ok=not kind, errors=[], traces=traces)
""",
}  # fmt: skip
"""Path in `site-packages` → text."""


def install(folder: Path) -> Path:
    """Makes the virtual environment, and returns its interpreter."""
    venv.create(folder, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for name, text in FILES.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
    return folder / "bin" / "python"
