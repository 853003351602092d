"""A scripted checkpoint that a whole engine serves: config.json, tokenizer.json, no tensors."""

from __future__ import annotations

import json
from pathlib import Path

from flare_ray.config import DeploymentConfig, EngineConfig, EngineDeployment
from flare_ray.contracts.request import GenerationRequest, SamplingSpec
from tests.support.scripted.geometry import Script, write_checkpoint
from tests.support.scripted.recipe import DOTTED

VOCAB_SIZE = 256
MAX_CONTEXT = 1 << 16
"""Long enough for generations that no fault test can outwait."""


def scripted_checkpoint(folder: Path) -> str:
    """Random rows over 256 tokens, where token n is the byte n; the drafter is right about half
    the time."""
    write_checkpoint(folder, Script(vocab_size=VOCAB_SIZE, seed=3, max_context_tokens=MAX_CONTEXT))
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(VOCAB_SIZE)}
    steps = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    tokenizer = {
        "added_tokens": [],
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "model.safetensors").touch()
    return str(folder)


def scripted_config(checkpoint: str, **fields) -> EngineConfig:
    """An engine of two slots on the CPU."""
    settings = {"concurrency": 2, "context_tokens": 512, "prefill_tokens": 64, **fields}
    return EngineConfig(
        checkpoint=checkpoint, recipe=DOTTED, device="cpu", dtype="float32", **settings
    )


def scripted_deployment(checkpoint: str, **fields) -> DeploymentConfig:
    """One engine replica, small enough for four logical CPUs."""
    return DeploymentConfig(
        model_name="scripted",
        engine=scripted_config(checkpoint, **fields),
        engine_deployment=EngineDeployment(
            cpus_per_rank=0.5, placement_timeout_s=2.0, graceful_shutdown_s=10.0
        ),
    )


def make_request(
    name: str, *, max_tokens: int = 40, temperature: float = 1.0, reply_to: str = ""
) -> GenerationRequest:
    """A request whose prompt is its name's bytes; sampled, with a seed of its own."""
    sampling = SamplingSpec(
        temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=sum(name.encode())
    )
    return GenerationRequest(
        request_id=name,
        prompt_tokens=tuple(name.encode()),
        sampling=sampling,
        max_tokens=max_tokens,
        reply_to=reply_to,
    )
