"""Names by which users of other engines know this engine's settings, and names of what is absent.

One table: options that are taken under a second name, and options that are refused with what to do
instead (docs/operators/from-other-engines.md is written from it; a test compares them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flare_ray.errors import ConfigError

ALIASES: Mapping[str, tuple[str, ...]] = {
    "context_tokens": ("--max-model-len", "--context-length"),
    "concurrency": ("--max-num-seqs", "--max-running-requests"),
    "prefill_tokens": ("--max-num-batched-tokens", "--chunked-prefill-size"),
    "kv_dtype": ("--kv-cache-dtype",),
    "prefix_cache": ("--enable-prefix-caching/--no-enable-prefix-caching",),
    "page_pool_tokens": ("--max-total-tokens",),
    "tensor_parallel_size": ("--tp-size",),
    "eager": ("--enforce-eager/--no-enforce-eager",),
}
"""Option of this project -> second names for the same setting."""

REFUSED: Mapping[str, str] = {
    "--gpu-memory-utilization": "memory is counted in bytes, not taken as a share: set "
    "--page-pool-tokens; `flare-ray plan` prints the sum",
    "--mem-fraction-static": "memory is counted in bytes, not taken as a share: set "
    "--page-pool-tokens; `flare-ray plan` prints the sum",
    "--api-key": "keys stand in a file, so that they can change and have limits: --keys-file",
    "--disable-radix-cache": "prefixes are kept unless --no-prefix-cache is given",
    "--quantization": "weights run in the format the checkpoint declares",
    "--speculative-config": "the checkpoint's own drafter is used: --mtp-draft-tokens, "
    "--no-mtp and --fixed-width choose how",
    "--speculative-algorithm": "the checkpoint's own drafter is used: --mtp-draft-tokens, "
    "--no-mtp and --fixed-width choose how",
    "--tool-call-parser": "the recipe knows its model's tool calls; leave it out",
    "--enable-auto-tool-choice": "tool calls are always parsed; leave it out",
    "--reasoning-parser": "the recipe knows its model's reasoning; leave it out",
    "--trust-remote-code": "no code of a checkpoint is ever run; leave it out",
    "--max-logprobs": "up to 20 alternatives are always available; leave it out",
    "--swap-space": "preempted requests need none; leave it out",
    "--block-size": "pages hold 64 tokens; leave it out",
    "--enable-chunked-prefill": "prompts are always consumed in chunks: --prefill-tokens is their "
    "size; leave it out",
    "--load-format": "checkpoints are read as safetensors; leave it out",
    "--tokenizer": "the tokeniser is the checkpoint's own: tokenizer.json in its folder",
    "--enable-lora": "adapters (LoRA) are not served",
    "--lora-modules": "adapters (LoRA) are not served",
    "--lora-paths": "adapters (LoRA) are not served",
    "--pipeline-parallel-size": "pipeline parallelism is not built: --tensor-parallel-size",
    "--pp-size": "pipeline parallelism is not built: --tensor-parallel-size",
    "--data-parallel-size": "one engine is one tensor-parallel group: set "
    "engine_deployment.replicas in the deployment file for more engines",
    "--dp-size": "one engine is one tensor-parallel group: set engine_deployment.replicas in the "
    "deployment file for more engines",
    "--enable-expert-parallel": "experts are split like every other weight; there is no expert "
    "parallelism",
    "--ep-size": "experts are split like every other weight; there is no expert parallelism",
    "--nnodes": "the ranks of one engine live on one node; more nodes carry more engines",
    "--dist-init-addr": "the ranks of one engine live on one node; more nodes carry more engines",
    "--kv-transfer-config": "prefill and decode run in the same engine; they cannot be split",
    "--disaggregation-mode": "prefill and decode run in the same engine; they cannot be split",
    "--limit-mm-per-prompt": "images, audio and video are not served yet",
    "--task": "only text generation is served: no embeddings, scores or rewards",
}
"""Option of another engine -> what to do here. `--served-model-name` and `--chat-template` are
options of `serve` and `debug-serve` under their own names."""


def refuse_foreign(arguments: Sequence[str]) -> None:
    """Refuse an option of another engine by name.

    Args:
        arguments: of the command line.
    Raises:
        ConfigError: one is among them.
    """
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name in REFUSED:
            raise ConfigError(f"{name}: {REFUSED[name]}")


def setting_known_as(key: str) -> str | None:
    """The option of this project that another engine calls `key`, as a setting's name; for
    suggestions."""
    flag = "--" + key.replace("_", "-")
    for option, names in ALIASES.items():
        if any(flag in name.split("/") for name in names):
            return option
    return None
