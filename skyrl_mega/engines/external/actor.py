"""An engine of the run whose server runs elsewhere: a Ray actor without a GPU, the client of one inference server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict
from typing import Any, cast

from skyrl_mega.engines.base import Completion, Drafts, EngineDied, Facts, Request, Sampling
from skyrl_mega.engines.external.answer import LONGEST_TEXT, ServerAnswer
from skyrl_mega.engines.external.open import ExternalSpec, open_server, ready
from skyrl_mega.engines.external.server import InferenceServer, ReceivingServer, ServerGone, ServerRefused
from skyrl_mega.engines.presence import Presence
from skyrl_mega.telemetry.memory import MemoryReading
from skyrl_mega.telemetry.trace import Span
from skyrl_mega.weights.exchange.executor import ExchangeReport
from skyrl_mega.weights.members import DIRECTORY

COALESCE_S = 0.004
"""Completions ending within this many seconds are sent in one message."""
BEATS = 4
"""Signs of life per `rollout.request_timeout_s` while no request ends."""
ASK_EVERY_S = 5.0
"""Seconds between two questions for the version while requests are under way."""
UNANSWERED = 3
"""Consecutive questions without an answer after which a server is gone."""


class ExternalEngine:
    """An engine outside of the run; implements `engines.base.Engine` and `engines.base.ForeignEngine`.

    The server's word is not enough: completions with tokens of a new weight version are held back until the driver
    compared the server's log-probs with the policy's and called `trust`.

    Every method that asks the server raises ServerGone (an EngineDied) if the server does not answer, and ServerRefused
    if the server refuses; a class of the user may raise other errors.

    Args:
        spec: The server.
    """

    def __init__(self, spec: ExternalSpec) -> None:
        self.spec = spec
        self.version = 0
        self.running = 0
        """Requests under way."""
        self.tokens = 0
        """Tokens received."""
        self.watched = False
        """True if time without a token counts as silence: not during a pause, nor before the first answer."""
        self.spans: list[Span] | None = None
        self.presence = Presence(())
        self.trusted = asyncio.Event()
        self.trusted.set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.calls: set[asyncio.Queue[Completion | BaseException]] = set()
        self.fetched: tuple[dict[str, Any], int] | None = None
        """Source and version of weights to load, for a server that loads a directory."""
        self.watch: asyncio.Task[None] | None = None

    @property
    def receiver(self) -> ReceivingServer | None:
        """The server, if its workers receive their own shards; None if it loads a directory."""
        return None if self.spec.sync == DIRECTORY else cast(ReceivingServer, self.server)

    async def start(self, former: Facts | None = None) -> Facts:
        """Waits, without limit, until the server answers; checks model and first tokens, and returns the facts.

        Args:
            former: Not used: the server keeps its own cache.

        Raises:
            UserError: The address is invalid; the server has another model, refuses the first tokens, or lacks what its
                way of taking weights needs; or the user's class of `kind` cannot be used.
            ServerGone: The server answered, and then failed while its version was read.
        """
        self.places = asyncio.Semaphore(self.spec.address.concurrency)
        self.server: InferenceServer = open_server(self.spec)
        found = await ready(self.server, self.spec)
        self.version = await self.server.version()
        self.watched = True
        estimate = self.spec.address.concurrency * self.spec.max_length
        return Facts(found.cache_tokens or estimate, 0, weights=self.spec.sync, foreign=True)

    # ---- generation ------------------------------------------------------------------------------------------------

    async def generate_many(self, requests: list[Request], sampling: Sampling) -> AsyncIterator[list[Completion]]:
        """Continues prompts; yields completions in small lists as requests end, each request once and in no given
        order. Empty lists show that the engine still works. After an update completions wait for `trust`. The end of
        `Request.seconds` is not an error (`finish` is then `timeout`). Arguments as in `Engine.generate_many`.

        Raises:
            EngineDied: The server is gone, silent for `rollout.request_timeout_s`, or serves another version.
            NotReady: Weights are undefined.
            ServerRefused: The server refuses a request, as for a prompt that is too long.
        """
        self.presence.check()
        done: asyncio.Queue[Completion | BaseException] = asyncio.Queue()
        self.running += len(requests)
        self.idle.clear()
        self.calls.add(done)
        if self.watch is None or self.watch.done():
            self.watch = asyncio.create_task(self._watch())
        tasks = [asyncio.create_task(self._generate(request, sampling, done, self.places)) for request in requests]
        remaining = len(requests)
        try:
            while remaining:
                ended = await self._ended(done)
                remaining -= len(ended)
                while not await self._until(self.trusted):
                    yield []
                yield ended
        finally:
            self.running -= len(requests)
            self.calls.discard(done)
            if not self.running:
                self.idle.set()
                self.watch.cancel()
            for task in tasks:
                task.cancel()

    async def _ended(self, done: asyncio.Queue[Completion | BaseException]) -> list[Completion]:
        """Returns the completions that ended, [] after a quarter of `silence_s` without one; raises a failure."""
        try:
            async with asyncio.timeout(self.spec.silence_s / BEATS):
                outcomes = [await done.get()]
        except TimeoutError:
            return []
        await asyncio.sleep(COALESCE_S)
        while not done.empty():
            outcomes.append(done.get_nowait())
        return _completions(outcomes)

    async def _until(self, event: asyncio.Event) -> bool:
        """Waits for an event, at most a quarter of `silence_s`; returns True if it is set."""
        try:
            async with asyncio.timeout(self.spec.silence_s / BEATS):
                await event.wait()
        except TimeoutError:
            return False
        return True

    async def _generate(
        self,
        request: Request,
        sampling: Sampling,
        done: asyncio.Queue[Completion | BaseException],
        places: AbstractAsyncContextManager[object],
    ) -> None:
        began = time.time()
        answer = ServerAnswer(request, self.spec.vocab, self.spec.max_length)
        try:
            async with asyncio.timeout(request.seconds) as limit:
                async with places:
                    answer.oldest = self.version
                    async for chunk in self.server.generate(request, sampling):
                        answer.add(chunk, self.version)
                        self.tokens += len(chunk.tokens)
        except TimeoutError as error:
            if not limit.expired():
                done.put_nowait(ServerGone(f"{self.spec.name}: {error or 'a time limit passed'}"))
                return
            answer.finish = "timeout"
        except (EngineDied, ServerRefused) as error:
            done.put_nowait(error)
            return
        except Exception as error:  # a class of the user may raise anything
            done.put_nowait(ServerGone(f"{self.spec.name}: {type(error).__name__}: {str(error)[:LONGEST_TEXT]}"))
            return
        if (problem := await self._problem(answer)) is not None:
            done.put_nowait(ServerGone(f"{self.spec.name} {problem}"))
            return
        if self.spans is not None:
            details = {"prompt": len(request.tokens), "tokens": len(answer.tokens)}
            self.spans.append(Span(request.id, began, time.time(), details))
        done.put_nowait(answer.completion())

    async def _problem(self, answer: ServerAnswer) -> str | None:
        """Returns what is wrong with a complete answer; None if nothing is."""
        if (problem := answer.problem(self.version)) is not None or answer.stated:
            return problem
        try:
            version = await self.server.version()
        except Exception as error:  # a class of the user may raise anything
            return f"does not state its version: {type(error).__name__}: {str(error)[:LONGEST_TEXT]}"
        return None if version == self.version else f"serves version {version}, not {self.version}"

    async def _watch(self) -> None:
        """Fails the calls under way if the server is silent, gone, or serves another version."""
        tokens, silent_s, unanswered, before = -1, 0.0, 0, time.monotonic()
        every = min(ASK_EVERY_S, self.spec.silence_s / 10)
        while silent_s < self.spec.silence_s and unanswered < UNANSWERED:
            await asyncio.sleep(every)
            now, watched = time.monotonic(), self.watched
            silent_s = silent_s + min(now - before, 2 * every) if watched and tokens == self.tokens else 0.0
            tokens, before = self.tokens, now
            if not watched:
                continue
            try:
                version = await self.server.version()
                unanswered = 0
            except Exception:  # counted: a server under load may miss a question
                unanswered += 1
                continue
            if watched and self.watched and version != self.version:
                self._fail(f"{self.spec.name} serves version {version}, not {self.version}: somebody else changed it")
                return
        what = "does not answer" if unanswered else f"sent no token for {self.spec.silence_s:g} s"
        self._fail(f"{self.spec.name} {what}")

    def _fail(self, cause: str) -> None:
        for done in self.calls:
            done.put_nowait(ServerGone(cause))

    async def drain(self) -> None:
        """Waits, without limit, until no request is under way."""
        await self.idle.wait()

    async def forget(self) -> None:
        """Drops the server's cached prefixes. No request may be under way."""
        await self.server.flush()

    # ---- weights ---------------------------------------------------------------------------------------------------

    async def connect_weights(self, info: dict[str, Any]) -> None:
        """Connects every worker of the server to the process group of weight transfers. Returns after all processes of
        the group joined. `info` as in `Engine.connect_weights`.

        Raises:
            RuntimeError: The server loads a directory.
            ServerGone, ServerRefused: The server does not answer, or refuses, for example because a process did not
                join.
        """
        await self._receiving().connect(info)

    async def fetch_weights(self, source: dict[str, Any], version: int) -> None:
        """Makes the server's workers download their shards, and waits for the end. For a server that loads a directory,
        only remembers the source for `update_weights`.

        Args:
            source: The fields of `weights.files.source.Source`; "path" and "timeout_s" for a server that loads a
                directory.
            version: Number of the weights.

        Raises:
            ServerGone, ServerRefused: The server does not answer, or its workers cannot read the weights.
        """
        self.fetched = (source, version)
        if self.receiver is not None:
            await self.receiver.fetch(source, version)

    async def pause(self) -> None:
        """Stops computing until `resume`; requests under way wait."""
        self.watched = False
        await self.server.pause()

    async def resume(self) -> None:
        """Resumes computing after `pause`. Raises NotReady if weights are undefined."""
        self.presence.check()
        await self.server.resume()
        self.watched = True

    async def sleep(self, parts: Sequence[str]) -> None:
        """Does nothing: the server's devices belong to no other process of the run."""

    async def wake(self, parts: Sequence[str]) -> None:
        """Does nothing: nothing was asleep."""

    async def begin_update(self) -> None:
        """Pauses the server, and opens the parameters of workers that receive their shards for writing. Raises
        ServerGone or ServerRefused if the server does not answer or refuses."""
        await self.pause()
        if self.receiver is not None:
            await self.receiver.begin()

    async def update_weights(self, checksums: bool) -> None:
        """Receives weights from the policy ranks, or loads the directory that `fetch_weights` named. `end_update`, or
        after an error `abandon_update`, must follow.

        Args:
            checksums: True to verify each part after arrival; not used for a directory.

        Raises:
            RuntimeError: The server loads a directory, and `fetch_weights` named none.
            ServerGone, ServerRefused: The server does not answer, refuses, or failed in the transfer.
        """
        if self.receiver is not None:
            await self.receiver.receive(checksums)
            return
        if self.fetched is None:
            raise RuntimeError("no directory to load; call fetch_weights before")
        await self.server.update(*self.fetched)

    async def end_update(self, version: int) -> list[dict[str, float]]:
        """Installs the received weights as `version`, and resumes computing.

        Before resuming, drops cached prefixes and asks the server for its version. Completions are held back from now
        on until `trust`. After an error the server stays paused.

        Returns:
            For each worker the fields of `ExchangeReport`: seconds and bytes of the update. A server that loads a
            directory gives a single entry of zeros.

        Raises:
            ServerGone: The server does not answer, or states another version.
            ServerRefused: The server refuses, for example because a worker lacks a part of the weights.
            NotReady: Weights are undefined.
        """
        reports = [asdict(ExchangeReport())]
        if self.receiver is not None:
            reports = await self.receiver.end(version)
        await self.server.flush()
        if (stated := await self.server.version()) != version:
            raise ServerGone(f"{self.spec.name} serves version {stated} after an update to {version}")
        self.trusted.clear()
        self.version, self.fetched, self.presence.defined = version, None, True
        await self.resume()
        return reports

    async def abandon_update(self) -> None:
        """Abandons an update. Until the end of another update a new request raises NotReady, and a paused server stays
        paused."""
        self.presence.defined, self.fetched = False, None
        if self.receiver is not None:
            await self.receiver.abandon()

    async def sample_probes(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        """Returns completions with the weights of the last update, also before `trust` and without regard to the limit
        of requests at once; in the order of `requests`. Arguments as in `Engine.generate_many`.

        Raises:
            ServerGone: The server failed.
            ServerRefused: The server refuses a request.
        """
        done: asyncio.Queue[Completion | BaseException] = asyncio.Queue()
        # Past the limit of requests at once: those under way may take long.
        await asyncio.gather(*(self._generate(request, sampling, done, nullcontext()) for request in requests))
        by_id = {completion.id: completion for completion in _completions([done.get_nowait() for _ in requests])}
        return [by_id[request.id] for request in requests]

    async def trust(self) -> None:
        """Releases the completions held back since the last update."""
        self.trusted.set()

    async def check_weights(self) -> list[dict[str, Any]]:
        """Compares the weights of every worker with the policy's, and returns for each worker the number of
        `parameters`, the `bytes` received, and the names of `different` parameters; [] for a server that loads a
        directory. The server pauses meanwhile.

        Workers in a process group receive the weights again: the policy ranks must send, with checksums, at the same
        time. Workers that read files compare with the weights last downloaded. A difference raises nothing.

        Raises:
            ServerGone, ServerRefused: The server does not answer or refuses.
            NotReady: Weights are undefined; raised after the comparison. The server stays paused.
        """
        if self.receiver is None:
            return []
        await self.pause()
        try:
            return await self.receiver.compare()
        finally:
            await self.resume()

    async def probe(self) -> None:
        """Waits for an answer of the server, and of every worker that receives weights; raises ServerGone without an
        answer."""
        await (self.server.version() if self.receiver is None else self.receiver.probe())

    def _receiving(self) -> ReceivingServer:
        if self.receiver is None:
            raise RuntimeError(f"{self.spec.name} loads a directory; call fetch_weights")
        return self.receiver

    # ---- health ----------------------------------------------------------------------------------------------------

    async def drafts(self) -> Drafts:
        """Returns zeros: a server's draft tokens are not counted."""
        return Drafts()

    async def measured(self) -> list[tuple[MemoryReading, dict[int, int]]]:
        """Returns []: the memory and the steps of an external server are not measured by the run."""
        return []

    async def record_spans(self, on: bool) -> list[Span]:
        """Starts (`on=True`) or stops recording the times of requests; returns the spans recorded since the previous
        call, [] if recording was off."""
        recorded, self.spans = self.spans or [], [] if on else None
        return recorded

    async def health(self) -> int:
        """Returns the version of the weights that the server states; 0 for weights that no update delivered."""
        return await self.server.version()


def _completions(outcomes: Sequence[Completion | BaseException]) -> list[Completion]:
    """Returns the outcomes of requests; raises the first outcome that is an error."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return cast(list[Completion], outcomes)
