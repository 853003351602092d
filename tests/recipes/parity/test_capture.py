"""Programs are capturable from birth: no operator waits for values, and no shape follows them."""

from __future__ import annotations

import pytest
import torch

from flare_ray.device.weights.kept import Keeping
from tests.recipes.parity.test_target import LOGITS_ATOL, largest_error
from tests.support.no_sync import HostWait, NoHostWait
from tests.support.recipe_driver import RecipeDriver

DEVICES = ("cpu", "cuda")


def run_watched(tiny, *, drafts: int) -> None:
    """Prefill, draft, verify and commit; a step that waits for values raises `HostWait`."""
    driver, tokens = tiny.driver, tiny.tokens
    lanes = tiny.fresh(2)
    driver.prefill(lanes, [tokens[:70], tokens[:20]])

    def watched(call):
        def run(*args):
            with NoHostWait():
                return call(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for part, name in (
            (driver.target, "forward"),
            (driver.drafter, "absorb"),
            (driver.drafter, "propose"),
        ):
            patch.setattr(part, name, watched(getattr(part, name)))
        driver.prefill(lanes, [tokens[70:101], tokens[20:23]], padded=1)
        driver.propose(lanes, [tokens[101], tokens[23]], drafts, padded=1)
        rows = [tokens[101:107], tokens[23:25]]
        verified = driver.verify(lanes, rows, width=drafts + 1, padded=1)
        driver.commit(verified, [4, 1])
        driver.propose(lanes, [tokens[105], tokens[24]], 0)


def test_no_step_of_a_round_or_a_prefill_waits_for_values(tiny):
    run_watched(tiny, drafts=5)


@pytest.mark.parametrize(
    "wait",
    [lambda v: v[0].item(), lambda v: v[v > 0], lambda v: v.nonzero(), lambda v: bool(v.any())],
)
def test_a_waiting_step_is_caught(wait):
    value = torch.tensor([1.0, 0.0])
    with pytest.raises(HostWait), NoHostWait():
        wait(value)


def test_the_same_program_twice_gives_the_same_bits(tiny):
    """Two slots of one history, one after the other."""
    results = []
    for lane in tiny.fresh(2):
        tiny.driver.prefill([lane], [tiny.tokens[:40]])
        results.append(tiny.driver.verify([lane], [tiny.tokens[40:46]]).output.logits)
    assert torch.equal(*results)


BFLOAT16_L2 = 0.3
"""Relative L2 error of a row's bfloat16 logits, median over rows; measured up to 0.2 on this random
model of width 64. Unrelated rows are 1.4 apart."""


def median_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((got - wanted).norm(dim=1) / wanted.norm(dim=1)).median())


@pytest.mark.parametrize("name", ["long", "qwen-long"])
def test_bfloat16_stays_near_float32_on_a_short_prompt(load_tiny, name):
    tiny = load_tiny(name)
    driver = RecipeDriver(tiny.folder, slots=1, dtype="bfloat16")
    lane = driver.open(0, [1, 2, 3])
    logits = driver.prefill([lane], [tiny.tokens[:24]])[0]
    assert logits.dtype == torch.float32
    assert median_error(logits, tiny.oracle.logits[:24]) <= BFLOAT16_L2
    verified = driver.verify([lane], [tiny.tokens[24:30]])
    assert median_error(verified.output.logits[0], tiny.oracle.logits[24:30]) <= BFLOAT16_L2
    driver.commit(verified, [6])
    sink = driver.propose([lane], [tiny.tokens[30]], 2)
    assert sink.logits[0].dtype == torch.float32
    assert median_error(sink.logits[0], tiny.oracle.mtp_logits[29:30]) <= BFLOAT16_L2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["wide", "long", "qwen-fused", "qwen-long"])
def test_captured_round_equals_the_cpu_and_follows_new_inputs(tiny_folder, name):
    """One graph, captured on a padded lane, replayed for two lanes in turn."""
    torch.backends.cuda.matmul.allow_tf32 = False
    tokens = torch.randint(3, 180, (100,), generator=torch.Generator().manual_seed(4)).tolist()
    starts, lanes, wanted = (40, 77), {}, []
    drivers = {
        device: RecipeDriver(tiny_folder(name), slots=2, keeping=Keeping(device))
        for device in DEVICES
    }
    for device, driver in drivers.items():
        lanes[device] = [driver.open(0, [3, 9, 4]), driver.open(1, [7, 1, 8])]
        driver.prefill(lanes[device], [tokens[:start] for start in starts])
    for lane, at in zip(lanes["cpu"], starts, strict=True):
        wanted.append(drivers["cpu"].verify([lane], [tokens[at : at + 6]]).output.logits)
    driver = drivers["cuda"]
    with torch.inference_mode():
        rows = driver._rows([], [], width=6, padded=1, columns=3)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(2):
                driver.target.forward(rows, driver.state)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = driver.target.forward(rows, driver.state)
        for lane, at, logits in zip(lanes["cuda"], starts, wanted, strict=True):
            fresh = driver._rows([lane], [tokens[at : at + 6]], columns=3)
            for field in ("tokens", "slots", "positions", "valid", "lengths", "page_table"):
                getattr(rows, field).copy_(getattr(fresh, field))
            rows.column.copy_(fresh.column)
            graph.replay()
            assert largest_error(output.logits.cpu(), logits) <= LOGITS_ATOL
