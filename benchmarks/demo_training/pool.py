"""Producer processes write blocks of packed rows into shared memory; one thread turns them into
batches.

No corpus file exists: generating and tokenising is faster (about 0.3 M tokens/s a core) than one
GPU trains.
"""

from __future__ import annotations

import os
import queue
import random
import shutil
import threading
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import load_corpus
from .family import family_of
from .generators import LONG_SHARES, TOKEN_SHARES
from .packing import packed_rows
from .settings import Settings
from .shape import LONG_ROW, SHORT_ROW

BLOCK_TOKENS = 131_072
MAX_WAITING_BLOCKS = 24
SHUFFLED_BATCHES = 16
SCRAMBLED_FUNCTIONS, FOLLOW_UPS, COPIES, RENAMES = 0.35, 0.4, 0.12, 0.4
"""Parts of the edits in training; held-out edits are single ones of functions as they are. A name
that occurs often is what a model of this size changes last."""
EXTRA_TARGETS = 2
"""A row carries the targets of its last position: the next token and the one after it."""


def produce(index: int, settings: Settings, long: bool) -> None:
    """Write blocks of rows until the pool folder disappears."""
    os.nice(10)  # the compiler's processes come first
    tokenizer = Tokenizer.from_file(str(settings.pack / "tokenizer.json"))
    base = settings.seed * 1000
    corpus = load_corpus(settings.pack, "train", max_files=settings.files, seed=base + index)
    corpus.long_context, corpus.scramble = long, SCRAMBLED_FUNCTIONS
    corpus.follow_ups, corpus.copies, corpus.restated = FOLLOW_UPS, COPIES, True
    corpus.renames = RENAMES
    length, kind = (LONG_ROW, "long") if long else (SHORT_ROW, "short")
    rows = packed_rows(
        random.Random(f"train-{base}-{index}"),
        corpus,
        tokenizer,
        length=length + EXTRA_TARGETS,
        shares=LONG_SHARES if long else TOKEN_SHARES,
        chat=family_of(settings.family).chat,
    )
    pool, number = settings.pool, 0
    while pool.is_dir():
        block = np.array([next(rows) for _ in range(BLOCK_TOKENS // length)], dtype=np.uint16)
        path = pool / f"writing-{kind}-{index}-{number}.npy"
        try:
            np.save(path, block)
            path.rename(pool / f"{kind}-{index}-{number}.npy")
        except FileNotFoundError:
            return  # the run ended and removed the folder
        number += 1
        while pool.is_dir() and len(list(pool.glob(f"{kind}-{index}-*"))) >= MAX_WAITING_BLOCKS:
            time.sleep(0.05)


def start_producers(settings: Settings) -> list[BaseProcess]:
    """Empty the pool and start all producers; call before the GPU is touched, they are forked."""
    shutil.rmtree(settings.pool, ignore_errors=True)
    settings.pool.mkdir(parents=True)
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = get_context("fork")
    processes: list[BaseProcess] = []
    for i in range(settings.workers):
        arguments = (i, settings, i < settings.long_workers)
        processes.append(context.Process(target=produce, args=arguments, daemon=True))
    for process in processes:
        process.start()
    return processes


def stop_producers(settings: Settings, processes: list[BaseProcess]) -> None:
    """End the producers and remove the pool."""
    shutil.rmtree(settings.pool, ignore_errors=True)
    for process in processes:
        process.terminate()
        process.join()


class Batches:
    """Batches of one row length, shuffled over several blocks.

    Args:
        settings: of the run.
        kind: ``short`` or ``long``.
        rows: rows a batch.
        device: where batches go.
    """

    def __init__(self, settings: Settings, kind: str, rows: int, device: torch.device):
        self._settings, self._kind, self._rows, self._device = settings, kind, rows, device
        self._queue: queue.Queue[Tensor] = queue.Queue(16)
        self._random = np.random.default_rng(settings.seed)
        threading.Thread(target=self._collect, daemon=True).start()

    def _blocks(self) -> Iterator[np.ndarray]:
        while self._settings.pool.is_dir():
            paths = sorted(self._settings.pool.glob(f"{self._kind}-*"))
            self._random.shuffle(paths)
            for path in paths:
                try:
                    block = np.load(path)
                    path.unlink()
                except FileNotFoundError:
                    return  # the run ended and removed the folder
                yield block
            if not paths:
                time.sleep(0.01)

    def _collect(self) -> None:
        waiting: list[np.ndarray] = []
        pinned = self._device.type == "cuda"
        for block in self._blocks():
            waiting.append(block)
            if sum(map(len, waiting)) < SHUFFLED_BATCHES * self._rows:
                continue
            rows = np.concatenate(waiting)
            self._random.shuffle(rows)
            whole = len(rows) // self._rows * self._rows
            for batch in np.split(rows[:whole], whole // self._rows):
                tensor = torch.from_numpy(batch.astype(np.int64))
                self._queue.put(tensor.pin_memory() if pinned else tensor)
            waiting = [rows[whole:]]

    def next(self, timeout_s: float = 300.0) -> Tensor:
        """[rows, length + 2] int64 on the device.

        Raises:
            TimeoutError: if the producers gave nothing for ``timeout_s``.
        """
        try:
            batch = self._queue.get(timeout=timeout_s)
        except queue.Empty as e:
            raise TimeoutError(
                f"no {self._kind} rows for {timeout_s:.0f} s: are the producers alive, and is "
                f"there room in {self._settings.pool}?"
            ) from e
        return batch.to(self._device, non_blocking=True)
