"""From completion records to requests: counters, visible output, ends (contract: T3, T5, T6)."""

from __future__ import annotations

from collections.abc import Iterator

from flare_ray.contracts.messages import Failed, TokenSource
from flare_ray.contracts.plan import LanePlan
from flare_ray.contracts.record import Flag, LaneRecord, Status, unpack_scores
from flare_ray.controller.cohort import Planner, SubmittedRound
from flare_ray.controller.grammar.gate import PARAM
from flare_ray.controller.grammar.masks import MaskWriter
from flare_ray.controller.live import LiveRequest, Phase
from flare_ray.controller.meters import Meters
from flare_ray.controller.paging.snapshots import Snapshots
from flare_ray.controller.ports import RoundResult
from flare_ray.controller.publication import Publisher
from flare_ray.controller.stops import End
from flare_ray.controller.verification import ProposalSource
from flare_ray.errors import ContractViolation

# Plain values: an operator of an enumeration costs a microsecond, reading a member 0.08.
_ACTIVE = int(Status.ACTIVE)
_NO_TOKEN = int(Status.NO_TOKEN)
_NONFINITE = int(Status.NONFINITE)
_ENDED = int(Status.EOS | Status.LENGTH)
_PREFILL = int(Flag.PREFILL)
_PREDICTION = int(ProposalSource.PREDICTION)
_OVER = Phase.ENDED
_TOKEN_SOURCES = {
    ProposalSource.LEARNED: TokenSource.DRAFTER,
    ProposalSource.HISTORY: TokenSource.HISTORY,
    ProposalSource.HISTORY_SHORT: TokenSource.HISTORY,
    ProposalSource.PREDICTION: TokenSource.PREDICTION,
    ProposalSource.REQUEST: TokenSource.OWN_TEXT,
    ProposalSource.REQUEST_SHORT: TokenSource.OWN_TEXT,
}
"""What clients are told of the policy's sources: one name for long and short matches."""


class Harvester:
    """Folds finished rounds into their requests."""

    def __init__(
        self,
        publisher: Publisher,
        planner: Planner,
        meters: Meters,
        snapshots: Snapshots,
        masks: MaskWriter,
    ) -> None:
        self._publisher = publisher
        self._snapshots = snapshots
        self._planner = planner
        self._meters = meters
        self._masks = masks
        self._last_harvest_ns = 0

    def fold(
        self, planned: SubmittedRound, result: RoundResult, now_ns: int
    ) -> Iterator[tuple[LiveRequest, End | Failed]]:
        """Update every lane's request; yields those that have ended, and how.

        A lane of a request that the host has ended meanwhile is dead, whatever it reports.

        Raises:
            ContractViolation: the records are not those of `planned`, or a device's view of a live
                request differs from the host's.
        """
        plan = planned.plan
        if result.round_id != plan.round_id or len(result.lanes) != len(planned.lanes):
            raise ContractViolation(
                f"round {result.round_id} with {len(result.lanes)} records answers round "
                f"{plan.round_id} with {len(planned.lanes)} lanes"
            )
        cost_ns = now_ns - max(self._last_harvest_ns, planned.started_ns)
        self._last_harvest_ns = now_ns
        self._planner.harvested(planned, result, cost_ns)
        self._meters.harvested(planned, result, cost_ns)
        self._snapshots.harvested(planned.captures, planned.lanes, result.lanes)
        for place, (live, record) in enumerate(zip(planned.lanes, result.lanes, strict=True)):
            live.in_flight.popleft()
            if live.phase is _OVER:
                continue
            lane = plan.lanes[place] if plan.lanes else None
            if lane is not None and lane.copy_tokens:
                self._count_copies(live, lane, record)
            end = self._fold_lane(live, record, now_ns, lane)
            if end is not None:
                yield live, end

    def _fold_lane(
        self, live: LiveRequest, record: LaneRecord, now_ns: int, lane: LanePlan | None
    ) -> End | Failed | None:
        if record.uid != live.uid or record.epoch != live.epoch:
            raise ContractViolation(
                f"round {record.round_id}: slot {live.slot} answers for request {record.uid} epoch "
                f"{record.epoch}, expected {live.uid} epoch {live.epoch}"
            )
        if record.status & _NO_TOKEN:
            return self._no_token(live, now_ns)
        if record.status & _NONFINITE:
            return Failed(
                live.request.request_id,
                "nonfinite_logits",
                f"the model produced no finite logits in round {record.round_id}; the request "
                "cannot be continued",
                emitted=live.emitted,
            )
        if not record.status & _ACTIVE:
            raise ContractViolation(
                f"round {record.round_id}: slot {live.slot} did nothing for a live request"
            )
        consumed_before = live.consumed_tokens
        if record.prompt_scores:
            self._score_prompt(live, record, consumed_before)
        live.consumed_tokens = record.consumed
        live.generated_tokens = live.generated_base + record.generated
        live.rounds += 1
        live.drafts_offered += record.offered
        live.drafts_accepted += record.accepted
        if not record.tokens:
            if live.copies is not None:
                live.copies.prepare()
            return None
        if live.request.top_logprobs >= 0:
            live.scores.extend(unpack_scores(record.scores, len(record.tokens)))
        if live.request.token_sources:
            live.sources.extend(token_sources(lane, record))
        if live.matcher is not None:
            live.owed.extend(record.tokens)
        before = live.stops.generated_tokens
        visible = live.stops.push(record.tokens)
        live.chain.tokens.extend(record.tokens)
        generated = live.stops.generated_tokens - before
        if live.copies is not None:
            # What was generated behind a stop is no part of any text.
            live.copies.advance(record.tokens[:generated], lane.copy_sources if lane else ())
        self._publisher.generated(generated)
        self._publisher.visible(live, visible, now_ns)
        if visible.end is None and record.status & _ENDED:
            raise ContractViolation(
                f"round {record.round_id}: the device ended request {live.uid} after "
                f"{record.generated} tokens (status {record.status}), its stops did not"
            )
        if not record.flags & _PREFILL:
            self._snapshots.advanced(live, consumed_before)
        if visible.end is not None:
            self._masks.settle(live)
            self._snapshots.finished(live, record)
        return visible.end

    def _count_copies(self, live: LiveRequest, lane: LanePlan, record: LaneRecord) -> None:
        """Add a round's copied drafts to the totals; a grammar may have replaced some."""
        source = lane.copy_sources[0]
        offered = min(len(lane.copy_tokens), record.offered)
        passed = zip(lane.copy_tokens, record.tokens[: record.accepted], strict=False)
        accepted = [copy == token for copy, token in passed]
        live.copies_offered += offered
        live.copies_accepted += sum(accepted)
        if source == _PREDICTION:
            live.predicted_offered += offered
            live.predicted_accepted += sum(accepted)
        self._meters.copies(source, offered, accepted)

    def _score_prompt(self, live: LiveRequest, record: LaneRecord, start: int) -> None:
        """Append the scores that a chunk from token `start` on brings, once each: a prompt that is
        consumed again after a preemption has some of them. All are told together."""
        prompt = len(live.request.prompt_tokens)
        rows = min(record.consumed, prompt - 1) - start
        known = len(live.prompt_scores) - start
        if rows <= known or known < 0:
            return
        scores = unpack_scores(record.prompt_scores, rows)
        live.prompt_scores.extend(scores[known:])
        if not live.scores_prompt:
            self._publisher.prompt_scored(live)

    def _no_token(self, live: LiveRequest, now_ns: int) -> End | Failed:
        """The end of a request whose bans and grammar have left no token.

        Where its grammar may end only a ban of the terminal tokens (min_tokens, a bias) was in the
        way: the output is whole, and the grammar's end goes first.
        """
        if self._masks.can_end(live):
            visible = live.stops.finish()
            self._publisher.visible(live, visible, now_ns)
            assert visible.end is not None
            return visible.end
        return Failed(
            live.request.request_id,
            "invalid_request_error",
            f"after {live.generated_tokens} tokens no token is left: logit_bias, bad_words, "
            "min_tokens and the grammar, taken together, forbid them all; loosen one of them",
            status=400,
            param="bad_words" if live.matcher is None else PARAM,
            emitted=live.emitted,
        )


def token_sources(lane: LanePlan | None, record: LaneRecord) -> list[TokenSource]:
    """One source per token of the record, whose first `accepted` ones are drafts.

    A copy that the plan does not know was put there by the lane's grammar.

    Args:
        lane: as planned; None = of a prefill.
    """
    if lane is None:
        return [TokenSource.TARGET] * len(record.tokens)
    sources = []
    for place, token in enumerate(record.tokens):
        if place >= record.accepted:
            sources.append(TokenSource.TARGET)
        elif place < len(lane.copy_tokens) and lane.copy_tokens[place] == token:
            sources.append(_TOKEN_SOURCES[ProposalSource(lane.copy_sources[place])])
        elif record.copy_bits >> place & 1:
            sources.append(TokenSource.GRAMMAR)
        else:
            sources.append(TokenSource.DRAFTER)
    return sources
