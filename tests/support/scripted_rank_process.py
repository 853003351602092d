"""A real rank of the scripted recipe as an operating-system process, without Ray:
`python -m tests.support.scripted_rank_process CONFIG_JSON SOCKET RANK PORT`.
"""

from __future__ import annotations

import os
import subprocess
import sys

from flare_ray.actors.listener import connect
from flare_ray.actors.rank import RankStart, prepare_on_device
from flare_ray.actors.rank_loop import HangUpWatch, LastWords, serve_rank
from flare_ray.actors.wire import RankHello
from flare_ray.config import EngineConfig


def main() -> None:
    text, address, rank, port = sys.argv[1:]
    config = EngineConfig.model_validate_json(text)
    start = RankStart(
        config=config,
        rank=int(rank),
        world_size=config.tensor_parallel_size,
        address=address,
        rendezvous=("127.0.0.1", int(port)),
        prepare=prepare_on_device,
    )
    words = LastWords()
    hello = RankHello(start.rank, start.world_size, os.getpid())
    sock = connect(address, hello, words_fd=words.fd, timeout_s=5.0)
    HangUpWatch(sock)
    serve_rank(sock, start.prepare(start), rank=start.rank)
    os._exit(0)


def start_scripted_rank(
    config: EngineConfig, address: str, rank: int, port: int
) -> subprocess.Popen[bytes]:
    """Start one; the caller waits for or kills it."""
    arguments = [config.model_dump_json(), address, str(rank), str(port)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.scripted_rank_process", *arguments]
    )


if __name__ == "__main__":
    main()
