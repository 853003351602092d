"""A scripted checkpoint with a chat tokeniser: a whole server answers with known text.

Its greedy continuation of a letter is the alphabet from the next letter on, round and round; any
other last token is followed by "a".
"""

from pathlib import Path
from string import ascii_lowercase

from flare_ray.config import DeploymentConfig, EngineDeployment, IngressDeployment
from tests.support.chat_checkpoint import write_chat_checkpoint
from tests.support.fake_engine_client import byte_tokens
from tests.support.scripted.geometry import Script, write_checkpoint
from tests.support.scripted.recipe import DOTTED

VOCAB_SIZE = 272


def served_checkpoint(folder: Path) -> str:
    """Write everything but weights, of which the scripted recipe has none."""
    write_chat_checkpoint(folder)
    letters = byte_tokens(ascii_lowercase)
    following = dict(zip(letters, (*letters[1:], letters[0]), strict=True))
    table = tuple(following.get(token, letters[0]) for token in range(VOCAB_SIZE))
    script = Script(
        vocab_size=VOCAB_SIZE,
        next_tokens=table,
        drafter="prefix",
        draft_right=2,
        max_context_tokens=8192,
    )
    write_checkpoint(folder, script)
    (folder / "model.safetensors").touch()
    return str(folder)


def alphabet_from(letter: str, count: int) -> str:
    """What the model says after `letter`."""
    first = ascii_lowercase.index(letter) + 1
    return "".join(ascii_lowercase[(first + i) % 26] for i in range(count))


def served_deployment(
    checkpoint: str, *, engines: int = 1, ingresses: int = 1, **engine: object
) -> DeploymentConfig:
    """Small enough for two engines and two HTTP replicas on eight logical CPUs."""
    settings = {"concurrency": 2, "context_tokens": 8192, "prefill_tokens": 64, **engine}
    return DeploymentConfig.model_validate(
        {
            "model_name": "letters",
            "engine": {
                "checkpoint": checkpoint,
                "recipe": DOTTED,
                "device": "cpu",
                "dtype": "float32",
                **settings,
            },
            "engine_deployment": EngineDeployment(
                replicas=engines,
                cpus_per_rank=0.5,
                placement_timeout_s=1.0,
                graceful_shutdown_s=5.0,
            ).model_dump(),
            "ingress": IngressDeployment(
                min_replicas=ingresses, max_replicas=ingresses, cpus=0.25
            ).model_dump(),
        }
    )
