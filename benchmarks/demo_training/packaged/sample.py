"""Lets the model write answers to generated prompts, for its drafter to learn from:
``python -m benchmarks.demo_training.packaged.sample CHECKPOINT OUT``.

Every chunk of requests is decoded together by one captured step, and written as soon as it is
done. The limit holds within a chunk too: what was written until then is kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ..captured import Captured
from ..phases import Clock
from ..train import logger, versions
from .batched import PackagedSession
from .model import PackagedModel, load_target
from .prompts import prompts
from .rows import Writer

TEMPERATURES = (0.5, 0.8, 1.0, 1.0)
"""Of a quarter of the requests each: drafts are used at every temperature, and the model's own
distribution is where they are hardest."""
CHECK_STEPS = 8
"""Steps between two looks at the clock and at who is done."""
DONE_SHARE = 0.92
"""Part of a chunk that has ended when the rest is cut off."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of a sampling run.

    Attributes:
        seconds: of the whole run, loading and warm-up included.
        requests: decoded together.
        prompt: most tokens of a prompt; longer ones are left out.
        answer: most tokens of an answer.
        seed: of prompts and draws.
    """

    seconds: float = 60.0
    requests: int = 1024
    prompt: int = 192
    answer: int = 320
    seed: int = 1


class Sampler:
    """Decodes chunks of requests in one session that every chunk uses anew."""

    def __init__(self, model: PackagedModel, limits: Limits, stop: list[int]) -> None:
        device = model.embed_tokens.weight.device
        count, self._limits = limits.requests, limits
        self._model = model
        self._session = PackagedSession(model, count, limits.prompt + limits.answer)
        choice = torch.arange(count, device=device) % len(TEMPERATURES)
        self._temperature = torch.tensor(TEMPERATURES, device=device)[choice][:, None]
        self._out = torch.zeros(count, limits.answer, dtype=torch.int64, device=device)
        self._column = torch.zeros(count, 1, dtype=torch.int64, device=device)
        self._stop = torch.tensor(stop, device=device)
        self._done = torch.zeros(count, dtype=torch.bool, device=device)
        self._step = Captured(self._advance, device)

    @torch.no_grad()
    def chunk(self, given: list[list[int]], more: Callable[[], bool]) -> list[list[int]]:
        """Answers to as many prompts as there are requests; each ends behind its stop token.

        Args:
            given: ids of the prompts.
            more: whether there is time.
        """
        session, limits = self._session, self._limits
        sizes = torch.tensor([len(p) for p in given], device=self._done.device)
        padded = torch.zeros(len(given), int(sizes.max()), dtype=torch.int64)
        for row, prompt in zip(padded, given, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        for state in (session.lengths, self._column, self._done):
            state.zero_()
        hidden = session.verify(padded.to(sizes.device))
        last = hidden[torch.arange(len(given), device=sizes.device), sizes - 1]
        session.lengths.copy_(sizes)
        token = self._drawn(last)
        steps = 1
        while steps < limits.answer:
            if steps % CHECK_STEPS == 0 and not (more() and self._open() > 1 - DONE_SHARE):
                break
            (token,) = self._step(token)
            steps += 1
        return self._answers(steps)

    def _open(self) -> float:
        return 1 - self._done.float().mean().item()

    def _advance(self, token: Tensor) -> tuple[Tensor, ...]:
        session = self._session
        hidden = session.verify(token)
        session.lengths.add_(1)
        return (self._drawn(hidden[:, 0]),)

    def _drawn(self, hidden: Tensor) -> Tensor:
        """Next tokens [B, 1] behind states [B, H], noted in the answers."""
        logits = self._model.logits(hidden).float() / self._temperature
        # The largest of logit + Gumbel noise is a draw from the softmax.
        noise = torch.empty_like(logits).exponential_().clamp_(min=1e-20).log_()
        token = (logits - noise).argmax(-1, keepdim=True)
        self._out.scatter_(1, self._column, token)
        self._column.add_(1)
        self._done.logical_or_(torch.isin(token[:, 0], self._stop))
        return token

    def _answers(self, steps: int) -> list[list[int]]:
        out = self._out[:, :steps]
        ends = torch.isin(out, self._stop)
        size = torch.where(ends.any(1), ends.int().argmax(1) + 1, steps)
        return [row[:n] for row, n in zip(out.tolist(), size.tolist(), strict=True)]


class Prompts:
    """Chunks of token ids, made ahead beside the decoding."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self._tokenizer, self._limits = tokenizer, limits
        self._source = prompts(f"train-{limits.seed}")
        self._pool = ThreadPoolExecutor(1)
        self._ahead = self._pool.submit(self._make)

    def next(self) -> list[list[int]]:
        """The next chunk."""
        chunk = self._ahead.result()
        self._ahead = self._pool.submit(self._make)
        return chunk

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)

    def _make(self) -> list[list[int]]:
        chunk: list[list[int]] = []
        count = self._limits.requests
        while len(chunk) < count:
            texts = [text for _, text in itertools.islice(self._source, count)]
            encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
            chunk += [e.ids for e in encoded if len(e.ids) <= self._limits.prompt]
        return chunk[:count]


def sample(checkpoint: Path, out: Path, limits: Limits) -> dict[str, object]:
    """Write answers until the time is up; returns and writes the report."""
    out.mkdir(parents=True, exist_ok=True)
    say, clock = logger(out / "log-sample.txt"), Clock(limits.seconds)
    clock.start()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(limits.seed)
    ahead = Prompts(Tokenizer.from_file(str(checkpoint / "tokenizer.json")), limits)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_target(checkpoint, device, dtype)
    say(f"loaded, {versions()}, {asdict(limits)}")
    config = model.config
    sampler = Sampler(model, limits, [0, config["eos_token_id"]])
    writer, conversations, written = Writer(out), 0, 0

    def more() -> bool:
        return clock.fraction() < 1

    try:
        while more():
            given = ahead.next()
            answers = sampler.chunk(given, more)
            pairs = zip(given, answers, strict=True)
            writer.add([p + a for p, a in pairs], [len(p) for p in given])
            conversations += len(given)
            written += sum(map(len, answers))
            rate = written / clock.elapsed()
            say(f"{conversations} conversations, {written} tokens, {rate:.0f}/s")
    finally:
        ahead.close()
    report = {
        "conversations": conversations,
        "written": written,
        "seconds": round(clock.elapsed(), 1),
        "limits": asdict(limits),
        "temperatures": TEMPERATURES,
        "versions": versions(),
    }
    (out / "report-sample.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return report


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="let a packaged model write text")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    for name, default in asdict(Limits()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    limits = Limits(**{name: getattr(args, name) for name in asdict(Limits())})
    print(json.dumps(sample(args.checkpoint, args.out, limits)), flush=True)


if __name__ == "__main__":
    main()
