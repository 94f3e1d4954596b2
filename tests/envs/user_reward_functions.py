"""Reward functions in the form of public verl and TRL examples, named by path like a user's."""

import asyncio
import re

import numpy as np


def gsm8k_strict(data_source, solution_str, ground_truth, extra_info=None):
    """Reward of a word problem: a float, by the number after `####`."""
    found = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str[-300:])
    if not found:
        return 0.0
    return 1.0 if found[-1].replace(",", "") == ground_truth else 0.0


def math_with_accuracy(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Reward of a competition problem: a dict, with -1 for a wrong answer."""
    match = re.findall(r"(?i)answer\s*:\s*([^\n]+)", solution_str)
    prediction = match[-1].strip() if match else "[INVALID]"
    correct = prediction == ground_truth
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": prediction}


def countdown(data_source, solution_str, ground_truth, extra_info=None, format_score=0.1, score=1.0):
    """Reward of an equation from given numbers; the ground truth is a struct."""
    match = re.findall(r"<answer>(.*?)</answer>", solution_str)
    if not match or not re.fullmatch(r"[\d+\-*/().\s]+", match[-1]):
        return 0
    if sorted(map(int, re.findall(r"\d+", match[-1]))) != sorted(ground_truth["numbers"]):
        return format_score
    return score if abs(eval(match[-1]) - ground_truth["target"]) < 1e-5 else format_score


async def judge(data_source, solution_str, ground_truth, extra_info, threshold=0.5, **kwargs):
    """Reward of a judge that is asked over the network: a coroutine, with a question from extra_info."""
    await asyncio.sleep(0)
    words = set(extra_info["question"].lower().split()) & set(solution_str.lower().split())
    share = np.float32(len(words) / len(extra_info["question"].split()))
    extra_info["asked"] = extra_info.get("asked", 0) + 1
    return {"score": np.float64(share >= threshold), "overlap": share, "asked": extra_info["asked"]}


slots = asyncio.Semaphore(2)
"""Slots of a judge, shared by all calls as a client would be; belongs to the event loop of the first wait."""


async def limited_judge(data_source, solution_str, ground_truth, extra_info):
    """Reward of a judge with a limit on calls at once; an answer of `never` is never judged."""
    async with slots:
        try:
            if solution_str == "never":
                extra_info["begun"].set()
            await asyncio.sleep(3600 if solution_str == "never" else 0.01)
        except asyncio.CancelledError:
            extra_info["cancelled"].set()
            raise
    if solution_str == "exit":
        raise SystemExit(3)
    return float(solution_str)


def by_source(data_source, solution_str, ground_truth, extra_info=None, weights=None):
    """Reward that depends on the data set, with weights of format and answer from the settings."""
    if data_source not in ("geometry", "algebra"):
        raise NotImplementedError(f"Reward function is not implemented for {data_source=}")
    formatted = bool(re.fullmatch(r"<think>.*</think>.*", solution_str, re.DOTALL))
    right = f"\\boxed{{{ground_truth}}}" in solution_str
    return weights["answer"] * right + weights["format"] * formatted


def unique_letters(completions, **kwargs):
    """Reward of TRL's quick start."""
    contents = [completion[0]["content"] for completion in completions]
    return [float(len(set(content))) for content in contents]


async def accuracy(prompts, completions, solution, **kwargs):
    """Reward in TRL's form with a column of the data set; None where the row has no solution."""
    rewards = []
    for prompt, completion, answer in zip(prompts, completions, solution, strict=True):
        assert prompt[-1]["role"] == "user"
        rewards.append(None if answer is None else float(answer in completion[-1]["content"]))
    return rewards


def only_answers(completions, prompts, answer):
    """Reward in TRL's form that takes one column alone."""
    return [float(truth in completion[-1]["content"]) for completion, truth in zip(completions, answer, strict=True)]


def no_prompts(completions, answer):
    """Reward in TRL's form that does not take the prompts, which TRL always passes."""
    return [0.0]


class Scorer:
    """A class, not a function."""

    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return 1.0


def broken(data_source, solution_str, ground_truth, extra_info=None):
    """Fails for one answer, and gives no number for another."""
    return {"right": 1.0} if solution_str == "dict" else float(solution_str)


def other_form(answer, truth):
    """Takes neither form's arguments."""
    return 1.0
