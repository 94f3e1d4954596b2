"""Rules of draft tokens: `rollout.drafts`, and vLLM's own settings in `rollout.options.speculative_config`."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl_mega.common.values import shown
from skyrl_mega.config.drafts import FROM_FILES, METHODS, OPTION, WEIGHTLESS, draft_method, speculative_config
from skyrl_mega.config.refusals import raising
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.fields import Refusals

KEY = f"rollout.options.{OPTION}"
SUPPORTED = (*WEIGHTLESS, *(METHODS[name] for name in FROM_FILES))
"""vLLM's methods that a run may use."""


@raising
def check_drafts(c: Config) -> Refusals:
    """Raises a UserError for drafts without a needed directory or with an unused directory, and for suffix drafts in a
    deterministic run.

    Also for a `rollout.options.speculative_config` that is no mapping, contradicts `rollout.drafts`, names no tried
    method or a method whose weights would be random, has no number of draft tokens, or accepts drafts at random.
    """
    r, given, method = c.rollout, c.rollout.options.get(OPTION), draft_method(c.rollout)
    yield from r.drafts.refusals()
    if given is not None and not isinstance(given, Mapping):
        yield KEY, "allowed is a mapping of vLLM's SpeculativeConfig, such as {method: ngram, …}", "", shown(given)
    yield from _method_refusals(c, method)
    if not method:
        return
    settings = speculative_config(r)
    if not settings.get("num_speculative_tokens"):
        yield (
            KEY,
            "num_speculative_tokens is missing",
            "give rollout.drafts.method and rollout.drafts.max_tokens instead",
        )
    if settings.get("rejection_sample_method") == "synthetic":
        why = "it accepts draft tokens at random, so that samples are not the policy's"
        yield f"{KEY}.rejection_sample_method", why, "leave it out"
    if method == "suffix" and c.run.deterministic:
        why = "suffix drafts depend on the engine's earlier answers, which a resumed run does not have"
        yield "rollout.drafts.method", why, "give rollout.drafts.method=ngram, or run.deterministic=false", "suffix"


def _method_refusals(c: Config, method: str) -> Refusals:
    """Yields refusals of the method in vLLM's settings."""
    drafts, given = c.rollout.drafts.method, c.rollout.options.get(OPTION)
    if not isinstance(given, Mapping) or not given:
        return
    if drafts != "none" and method != METHODS[drafts]:
        why = f"rollout.drafts.method={drafts} says {METHODS[drafts]}"
        yield f"{KEY}.method", why, "leave one of them out"
    elif not method:
        yield KEY, f"a method is missing; allowed is one of {', '.join(SUPPORTED)}", "", shown(dict(given))
    elif method not in SUPPORTED:
        yield (
            f"{KEY}.method",
            f"such drafts have not been tried with a policy that is trained; allowed is one of {', '.join(SUPPORTED)}",
        )
    elif method not in WEIGHTLESS and drafts == "none":
        (name,) = (name for name in FROM_FILES if METHODS[name] == method)
        path = "" if name == "mtp" else " and rollout.drafts.path"
        yield (
            f"{KEY}.method",
            "vLLM would give the drafts random weights",
            f"give rollout.drafts.method={name}{path} instead",
        )
