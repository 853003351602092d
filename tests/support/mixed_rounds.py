"""One sequence of plans with every kind of program and lane, for engines that must agree."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from flare_ray.contracts.plan import (
    LanePlan,
    LogitRule,
    MaskAnswer,
    PrefillLane,
    RoundPlan,
    SlotRestore,
    SnapshotSave,
)
from flare_ray.contracts.shapes import GraphKind
from flare_ray.device.sampling.masks import mask_words
from tests.support.scripted.harness import Driver, Request, Sampling

GREEDY = Sampling()
PLAIN = Sampling(temperature=1.1, top_k=20, top_p=0.8, seed=9)
SPECIAL = Sampling(
    temperature=0.9,
    top_k=0,
    top_p=0.9,
    min_p=0.01,
    seed=3,
    repetition=1.2,
    presence=0.3,
    rules=(LogitRule(5, 1.5, 1 << 40),),
    bad_words=((4, 9), (11,)),
    top_logprobs=3,
    coupled=True,
)
BUDGET = 60
Mixes = Sequence[Sequence[Sampling]]
MIXES: Mixes = ((PLAIN, PLAIN), (PLAIN, SPECIAL), (GREEDY, GREEDY))


def play(driver: Driver, widths: Sequence[int], mixes: Mixes = MIXES) -> None:
    """For each set of samplings: prompts in chunks, rounds of every width with fewer lanes too, and
    the special rounds of the widest one."""
    for samplings in mixes:
        prompts = [tuple(range(1, 41)), (7, 8, 9), tuple(range(3, 70)), (2, 2)]
        opened = [
            driver.open(prompt, slot, budget=BUDGET, sampling=sampling, eos=())
            for slot, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=False))
        ]
        requests = driver.prefill(opened, chunk=24)
        for width in (*widths, widths[-1], widths[-1]):
            driver.round(requests, width)
        driver.round(requests[:1], widths[-1])
        special_rounds(driver, requests, widths[-1])
        if driver.manifest.snapshot_rows:
            resumed(driver, requests[0], widths[-1])
        for request in requests:
            driver.close(request)


def special_rounds(driver: Driver, requests: Sequence[Request], width: int) -> None:
    """A round with copies, masked ones with a barrier (what it is answered: nothing, fewer drafts,
    other drafts), and a masked one of width one."""
    drafts = width - 1
    copied = [
        LanePlan(r.slot, r.epoch, drafts, tuple(range(1, width)), (1,) * drafts) for r in requests
    ]
    if driver.manifest.copy_inputs:
        driver.round(requests, width, lanes=copied)
    masks = np.full((2 * width, mask_words(driver.manifest.vocab_size)), 0x0F0F0FFF, np.int32)
    lanes = [LanePlan(r.slot, r.epoch, drafts) for r in requests]
    first = msgspec.structs.replace(lanes[0], mask_row=0)
    driver.round(requests, width, lanes=[first, *lanes[1:]], masks=masks)
    limits = (max(drafts - 1, 0), *(drafts for _ in requests[1:]))
    forced = ((1,) * limits[0], *(() for _ in requests[1:]))
    for copies in ((), forced):
        driver.barrier = lambda round_id, _, copies=copies: MaskAnswer(round_id, limits, copies)
        driver.round(requests, width, lanes=[first, *lanes[1:]], masks=masks)
    driver.barrier = None
    alone = LanePlan(requests[0].slot, requests[0].epoch, 0, mask_row=2)
    driver.round(requests[:1], 1, lanes=[alone], masks=masks)


def resumed(driver: Driver, request: Request, width: int) -> None:
    """Stop a request, and let another slot go on from a snapshot of where it was."""
    history, consumed = (*request.prompt, *request.tokens), request.records[-1].consumed
    slot = driver.manifest.slots - 1
    # What a restore brings was counted by no program, so the rest is drawn without penalties.
    opened, init, grant = driver.open(history[:consumed], slot, budget=20, sampling=PLAIN, eos=())
    page = (consumed - 1) // 64
    plan = RoundPlan(
        round_id=next(driver.round_ids),
        shape=driver.shape(GraphKind.RESUME, 1, 1, True),
        inits=(init,),
        grants=(grant,),
        prefill=(PrefillLane(slot, opened.epoch, consumed, (), True, history[consumed]),),
        context_pages=len(opened.pages),
        saves=(SnapshotSave(request.slot, request.epoch, consumed, 1, True),),
        restores=(
            SlotRestore(slot, opened.epoch, 1, consumed, request.pages[page], opened.pages[page]),
        ),
    )
    driver._note([opened], driver.submit(plan))
    while not opened.ended:
        driver.round([opened], width)
    driver.close(opened)
