"""Arms in pairs: the same sessions on every arm in turn, before the next sessions begin.

    for repeat:                     a whole pass over the chosen items
      for category, chunk:          a few sessions, a *block*
        for arm in turn:            order rotates from chunk to chunk and turns round every pass
          run the block, write every observation, then the block's end

So a disturbance of the machine meets neighbouring arms alike, and no arm is always first
(contract: B2). Warm-up blocks run other sessions before anything counts and are written apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from flare_ray.errors import ConfigError
from flare_ray.metrics.exposition import Exposition
from flare_ray.workload.arrivals import Arrivals
from flare_ray.workload.checks import Verdict, check
from flare_ray.workload.drive import Timed, drive
from flare_ray.workload.endpoints import Endpoint, Reply, Request
from flare_ray.workload.items import Item, sessions_of
from flare_ray.workload.records import WARM, ArmStart, BlockEnd, BlockKey, Journal, Observation


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What shapes the requests, equally in every arm.

    Attributes:
        sessions: measured conversations of each category.
        warm: further ones of each category, run before anything counts.
        repeats: passes over all of them.
        chunk: conversations of a block.
        max_tokens: upper bound of every output budget; 0 = the items' own.
        temperature: of every request; None = the checkpoint's default.
        ignore_eos: run every answer to its budget; verdicts then mean nothing.
        reproducible: draw by position, so that arms write equal text; None = say nothing.
        salted: prefixes are reused within a block only, so that every pass starts equally cold;
            needs a server that knows `cache_salt`.
    """

    categories: tuple[str, ...]
    arrivals: Arrivals
    sessions: int = 8
    warm: int = 1
    repeats: int = 1
    chunk: int = 4
    max_tokens: int = 0
    temperature: float | None = None
    ignore_eos: bool = False
    reproducible: bool | None = None
    salted: bool = False


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of serving.

    Attributes:
        described: how it was started; a command where there is one.
        predicts: whether requests offer the items' predictions as copied drafts.
    """

    name: str
    endpoint: Endpoint
    described: str
    predicts: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """Sessions that every arm runs in turn."""

    category: str
    repeat: int
    chunk: int
    sessions: tuple[tuple[Item, ...], ...]


def blocks_of(items: Sequence[Item], settings: RunSettings) -> list[Block]:
    """All blocks in order, warm-up first.

    Raises:
        ConfigError: a category has too few conversations.
    """
    by_category: dict[str, list[tuple[Item, ...]]] = {name: [] for name in settings.categories}
    for session in sessions_of(items):
        if session[0].category in by_category:
            by_category[session[0].category].append(session)
    wanted = settings.sessions + settings.warm
    for category, sessions in by_category.items():
        if len(sessions) < wanted:
            raise ConfigError(
                f"{wanted} conversations of {category} are needed ({settings.sessions} measured, "
                f"{settings.warm} to warm up), the workload has {len(sessions)}"
            )
    warm = [
        Block(category, WARM, 0, tuple(sessions[settings.sessions : wanted]))
        for category, sessions in by_category.items()
        if settings.warm
    ]
    return warm + [
        Block(category, repeat, place // settings.chunk, tuple(part))
        for repeat in range(settings.repeats)
        for category, sessions in by_category.items()
        for place in range(0, settings.sessions, settings.chunk)
        for part in [sessions[: settings.sessions][place : place + settings.chunk]]
    ]


def in_turn(arms: Sequence[Arm], number: int, repeat: int) -> list[Arm]:
    """Arms in the order of the block `number`: rotated, and turned round on every odd pass."""
    first = number % len(arms)
    ordered = [*arms[first:], *arms[:first]]
    return ordered[::-1] if repeat % 2 else ordered


class Runner:
    """Runs what a journal does not hold yet.

    Args:
        tokens: prompt ids by item, for endpoints that take ids.
        on_block: told of each block's end, for progress; its counts are (done, all).
    """

    def __init__(
        self,
        journal: Journal,
        settings: RunSettings,
        *,
        tokens: Mapping[str, tuple[int, ...]],
        on_block: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._journal, self._settings, self._tokens = journal, settings, tokens
        self._on_block = on_block

    def run(self, arms: Sequence[Arm], items: Sequence[Item]) -> None:
        """Run every missing block of every arm."""
        blocks = blocks_of(items, self._settings)
        done, total = 0, len(blocks) * len(arms)
        ended = self._journal.ended()
        for arm in arms:
            self._journal.write(ArmStart(arm=arm.name, described=arm.described))
        for number, block in enumerate(blocks):
            for arm in in_turn(arms, number, block.repeat):
                # Warm-up is repeated after a kill: the servers are new.
                if block.repeat == WARM or _key(arm, block) not in ended:
                    self._run(arm, block)
                done += 1
                self._on_block(done, total)

    def _run(self, arm: Arm, block: Block) -> None:
        key = _key(arm, block)
        attempt = self._journal.next_attempt(key)
        before, cpu_s = arm.endpoint.counters(), time.process_time()
        started_s = time.perf_counter()
        sessions = [[self._request(arm, item, block) for item in s] for s in block.sessions]

        def note(timed: Timed) -> None:
            self._journal.write(observed(timed, key, attempt=attempt, started_s=started_s))

        arrivals = self._settings.arrivals
        drive(arm.endpoint, sessions, arrivals, seed=block.chunk, on_timed=note)
        wall_s = time.perf_counter() - started_s
        cpu_s = time.process_time() - cpu_s if arm.endpoint.in_process else -1.0
        self._journal.write(
            BlockEnd(
                block=key,
                attempt=attempt,
                wall_s=wall_s,
                cpu_s=cpu_s,
                counters=_growth(before, arm.endpoint.counters()),
            )
        )

    def _request(self, arm: Arm, item: Item, block: Block) -> Request:
        chosen = self._settings
        budget = item.settings.max_tokens
        return Request(
            item=item,
            ids=self._tokens.get(item.item_id, ()),
            max_tokens=min(budget, chosen.max_tokens) if chosen.max_tokens else budget,
            temperature=chosen.temperature,
            ignore_eos=chosen.ignore_eos,
            reproducible=chosen.reproducible,
            cache_salt=f"{block.category}-{block.repeat}-{block.chunk}" if chosen.salted else "",
            predict=arm.predicts,
        )


def _key(arm: Arm, block: Block) -> BlockKey:
    return BlockKey(arm=arm.name, category=block.category, repeat=block.repeat, chunk=block.chunk)


def observed(timed: Timed, key: BlockKey, *, attempt: int, started_s: float) -> Observation:
    """A timed request as it is written down, its answer checked."""
    item, reply = timed.request.item, timed.reply or Reply()
    verdict = Verdict(None) if timed.reply is None else check(item.expected, reply.answer)
    return Observation(
        block=key,
        attempt=attempt,
        item_id=item.item_id,
        session=item.session,
        turn=item.turn,
        intended_s=timed.intended_s - started_s,
        sent_s=timed.sent_s - started_s,
        ended_s=timed.ended_s - started_s,
        chunk_ms=tuple(round((at - timed.intended_s) * 1e3, 3) for at in reply.chunk_s),
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        cached_tokens=reply.cached_tokens,
        finish_reason=reply.finish_reason,
        answer=reply.answer,
        right=verdict.right,
        reason=verdict.reason,
        error=timed.error,
        offered=reply.offered,
        accepted=reply.accepted,
        copied=reply.copied,
        copied_accepted=reply.copied_accepted,
        rounds=reply.rounds,
        cpu_s=timed.cpu_s if timed.reply is not None else -1.0,
    )


def _growth(before: Exposition | None, after: Exposition | None) -> dict[str, float]:
    """Growth of every counter and histogram sum that changed, written `name{label="value"}`."""
    if before is None or after is None:
        return {}
    return dict(_changed(after.since(before)))


def _changed(grown: Exposition) -> Iterator[tuple[str, float]]:
    for (name, labels), value in sorted(grown.values.items()):
        if value and name.endswith(("_total", "_sum", "_count")):
            shown = ",".join(f'{label}="{text}"' for label, text in labels)
            yield (f"{name}{{{shown}}}" if shown else name), value
