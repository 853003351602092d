"""`LLM`: the engine in this process, for offline use; no HTTP and no Ray (contract: G8).

The controller and the ranks are threads of this process, and everything below the public calls is
what the server runs too: continuous batching, speculation, stops on bytes, the same random streams.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack

from flare_ray.actors.openmp import wait_passively
from flare_ray.cli.options import engine_config
from flare_ray.cli.outputs import RequestOutput, StreamOutput
from flare_ray.cli.runner import Job, Runner
from flare_ray.config import (
    AdmissionConfig,
    EngineConfig,
    GrammarConfig,
    PrefixCacheConfig,
    SamplingConfig,
    SpeculationConfig,
)
from flare_ray.contracts.request import SamplingParams
from flare_ray.errors import InvalidRequest

if TYPE_CHECKING:
    from types import TracebackType

    from flare_ray.controller.loop import ControllerStats

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""


class EngineSettings(TypedDict, total=False):
    """Fields of `EngineConfig` besides the checkpoint; see there for meanings and defaults."""

    recipe: str | None
    tensor_parallel_size: Literal[1, 2, 4, 8]
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    concurrency: int
    context_tokens: int
    page_pool_tokens: int | None
    prefill_tokens: int
    queue_depth: Literal[1, 2]
    threads_per_rank: int
    kv_dtype: Literal["float32", "bfloat16"] | None
    quantised_activations: Literal["as_declared", "never"]
    expert_weights: Literal["auto", "packed", "dequantised"]
    tables: Literal["device", "host", "disk"]
    eager: bool
    core: str | None
    debug_checks: bool
    rank_timeout_s: float
    speculation: SpeculationConfig | Mapping[str, Any]
    admission: AdmissionConfig | Mapping[str, Any]
    prefix_cache: PrefixCacheConfig | Mapping[str, Any]
    sampling: SamplingConfig | Mapping[str, Any]
    grammar: GrammarConfig | Mapping[str, Any]


class LLM:
    """A model ready to generate; use it as a context manager, or call `close`.

    Any thread may call any method; requests of all threads share the engine's rounds. Ctrl-C in a
    call cancels that call's requests.

    Example:
        with LLM("checkpoints/demo", device="cpu", dtype="float32") as llm:
            [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=64))

    Args:
        checkpoint: folder with config.json, *.safetensors and tokenizer.json.
        settings: fields of `EngineConfig`.
    Raises:
        ConfigError: a setting is unknown or wrong.
        CheckpointError: the checkpoint does not match its recipe.
        CapacityError: it does not fit.
        RankFailure: the first generation failed.
    """

    def __init__(self, checkpoint: str | Path, **settings: Unpack[EngineSettings]) -> None:
        section: dict[str, Any] = {"checkpoint": str(checkpoint), **settings}
        self._open(engine_config(section, {}, prefix=""))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """The engine of a validated configuration, such as a deployment file's; raises as `LLM`."""
        llm = cls.__new__(cls)
        llm._open(config)
        return llm

    def _open(self, config: EngineConfig) -> None:
        wait_passively()
        from flare_ray.actors.inprocess import start_inprocess
        from flare_ray.frontend.tokenizer import TextCodec
        from flare_ray.recipes import registry

        self.config = config
        engine = start_inprocess(config)
        # Called once: by `close`, or when the object is dropped, or at the interpreter's exit.
        self._shutdown = weakref.finalize(self, engine.shutdown, 0.0)
        try:
            recipe = registry.get(config.recipe or engine.manifest.recipe)
            self._codec = TextCodec(Path(config.checkpoint), recipe.chat)
            self._runner = Runner(engine, self._codec.token_bytes, config=config)
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, batched continuously.

        Args:
            prompts: text, texts, or lists of token ids (one prompt of ids is a list in a list).
            sampling_params: one for all, or one per prompt; None = the checkpoint's defaults.
        Returns:
            One output per prompt, in their order.
        Raises:
            InvalidRequest: a prompt or parameter is wrong; nothing has run.
            FlareError: a request failed; the others of this call are cancelled.
        """
        listed: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        params = _per_prompt(sampling_params, len(listed))
        jobs = [
            self._job(prompt, one, f"prompts[{place}]")
            for place, (prompt, one) in enumerate(zip(listed, params, strict=True))
        ]
        return self._runner.run(jobs)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many; `RequestOutput.text` keeps the format's tags.

        Args:
            messages: OpenAI chat messages, or a list of conversations.
            tools: OpenAI function declarations.
            template_options: variables of the checkpoint's chat template.
        Raises:
            InvalidRequest: as `generate`, or the messages are malformed.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        ids = [
            self.encode_chat(conversation, tools=tools, template_options=template_options)
            for conversation in conversations
        ]
        return self.generate(ids, sampling_params)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamOutput]:
        """Parts of one generation as they become visible; the last one carries the whole.

        The prompt is checked now and submitted at the first `next`. Closing the iterator cancels
        the request. For a conversation pass `encode_chat(messages)`.

        Raises:
            InvalidRequest: the prompt or a parameter is wrong.
        """
        return self._runner.stream(self._job(prompt, sampling_params or SamplingParams(), "prompt"))

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt."""
        return self._codec.encode_prompt(text)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation up to where the answer begins.

        Raises:
            InvalidRequest: the messages are malformed, an option is none of the template's, or the
                checkpoint has no chat template.
        """
        from flare_ray.frontend.openai.messages import normalise_messages, normalise_tools

        template = self._codec.template
        if template is None:
            raise InvalidRequest(
                f"{self.config.checkpoint} has no chat template: use generate with a text prompt",
                param="messages",
            )
        options = dict(template_options or {})
        unknown = sorted(set(options) - template.variables)
        if unknown:
            raise InvalidRequest(
                f"the chat template reads {sorted(template.variables)}, not {unknown}",
                param="template_options",
            )
        _, ids = self._codec.encode_chat(
            normalise_messages(messages), tools=normalise_tools(tools) or None, options=options
        )
        return ids

    def stats(self) -> ControllerStats:
        """What runs, waits and is free, at once."""
        return self._runner.engine.stats()

    def close(self) -> None:
        """Stop the engine and free its memory; requests of other threads fail. Idempotent."""
        self._shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _job(self, prompt: Prompt, params: SamplingParams, where: str) -> Job:
        if not self._shutdown.alive:
            raise InvalidRequest("this LLM has been closed: make a new one")
        if isinstance(prompt, str):
            return self._runner.job(prompt, self._codec.encode_prompt(prompt), params)
        return self._runner.job(None, _token_ids(prompt, where), params)


def _token_ids(prompt: Any, where: str) -> tuple[int, ...]:
    if not isinstance(prompt, Sequence) or not all(type(token) is int for token in prompt):
        raise InvalidRequest(
            f"{where}: expected text or a list of token ids, got {type(prompt).__name__}; a single "
            "prompt of ids is a list in a list",
            param="prompts",
        )
    return tuple(prompt)


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest(
            f"{len(params)} sampling_params for {count} prompts: give one for all or one each",
            param="sampling_params",
        )
    return params
