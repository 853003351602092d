"""What offline generation hands back."""

from __future__ import annotations

import msgspec

from flare_ray.contracts.record import TokenScore


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request.

    Attributes:
        completion_tokens: generated tokens through the one that ended the request, a hidden end or
            stop token included; at least the length of `token_ids`.
    """

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Rounds of one request and what drafting gained."""

    rounds: int
    drafts_offered: int
    drafts_accepted: int

    @property
    def acceptance_ratio(self) -> float:
        """Accepted over offered drafts; 0 where none was offered."""
        return self.drafts_accepted / self.drafts_offered if self.drafts_offered else 0.0


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One finished generation.

    Attributes:
        prompt: the text as given; None for a prompt of token ids.
        prompt_token_ids: what the model was given.
        text: visible text; tags of the chat format (reasoning, tool calls) stay in it.
        token_ids: visible tokens; `text` may end inside the last one, where a stop string began.
        finish_reason: "stop" or "length".
        stop_reason: the stop string, token id or token sequence that matched, or None.
        logprobs: one per token of `token_ids`, None where not asked for.
        prompt_logprobs: one per prompt token, None in place of the first; None where not asked for.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | tuple[int, ...] | None
    usage: Usage
    speculation: Speculation
    logprobs: tuple[TokenScore, ...] | None = None
    prompt_logprobs: tuple[TokenScore | None, ...] | None = None


class StreamOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Newly visible part of one generation.

    Attributes:
        text: concatenated over the stream it equals the final text; may be empty while a character
            is incomplete.
        token_ids: likewise.
        finished: the whole generation, on the last item only.
    """

    text: str
    token_ids: tuple[int, ...]
    finished: RequestOutput | None = None
