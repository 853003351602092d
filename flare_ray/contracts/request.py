"""What a client asked for: as written (`SamplingParams`) and as the engine runs it
(`SamplingSpec`, `GenerationRequest`)."""

from __future__ import annotations

import msgspec

from flare_ray.contracts.grammar import GrammarSpec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling as a user writes it; None means the checkpoint's default (contract: S3).

    Temperature 0 means greedy: it is run as top-k 1 under the same sampler (contract: S2).
    `logit_bias` pairs token ids with addends; `bad_words` and `stop_token_sequences` are token
    sequences. `reproducible` None leaves it to the deployment whether a `seed` makes the text
    independent of width, batch and drafts (contract: S4, S8). `logprobs` and `prompt_logprobs` ask
    for log-probabilities with that many alternatives (contract: K4). `grammar` is what the
    output must match (contract: K1).
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    reproducible: bool | None = None
    stop_token_sequences: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None


class SamplingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling as the device runs it: every value explicit and inside its range.

    temperature > 0; top_k >= 0, 0 = off, never above the vocabulary; 0 < top_p <= 1; 0 <= min_p <
    1; seed in [0, 2**64); repetition_penalty > 0.
    Order: repetition penalty (prompt and output), presence and frequency penalties (output), logit
    bias and min_tokens, bad words, grammar mask, temperature, top-k, top-p, min-p.

    Attributes:
        logit_bias: (token, addend).
        min_tokens: generated tokens before which neither EOS nor a stop may end the output.
        bad_words: token sequences that the output may not contain.
        reproducible: position-keyed draws (contract: S8).
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    reproducible: bool = False


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One admitted-or-waiting generation. All validation that needs no engine state has already
    happened.

    Attributes:
        request_id: unique among live requests; a second live request with the same id is refused.
        prompt_tokens: token ids, at least one.
        max_tokens: output budget, >= 1; the submitter has already bounded it by the context.
        stop: stop strings as UTF-8 bytes; matched by the controller on bytes across tokens and
            rounds (contract: K2).
        include_stop: whether the matched stop bytes stay visible.
        stop_token_ids: host-visible stop tokens; hidden from the output like an EOS.
        ignore_eos: the checkpoint's EOS set does not end this request.
        stop_sequences: token sequences that end the output, hidden like a stop string.
        grammar: what the output must match (contract: K1); None = anything.
        top_logprobs: alternatives reported with every token's log-probability; -1 = neither.
        prompt_logprobs: likewise of every prompt token but the first.
        reply_to: receiving address of the ingress replica's stream socket; "" for an in-process
            consumer.
        priority: lower runs earlier; fair shares among tenants of equals, arrival order within one.
        tenant: who is served fairly beside others, by name; "" = whoever names none.
        weight: its share under load, relative to those of other tenants; > 0.
        cache_salt: prefixes are reused among requests of equal salt only (one salt per tenant).
        session: name of the conversation it belongs to, which a router keeps on one engine; "" =
            none is known, and its prompt decides.
        prediction: token ids that the client expects as output, offered as copied drafts
            (contract: H3); () = none.
        token_sources: tell with every visible token where it came from.
        deadline_s: seconds after arrival at which the request is ended with an error; 0 = none.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingSpec
    max_tokens: int
    stop: tuple[bytes, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    top_logprobs: int = -1
    prompt_logprobs: int = -1
    reply_to: str = ""
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    deadline_s: float = 0.0
    cache_salt: str = ""
    session: str = ""
    grammar: GrammarSpec | None = None
    prediction: tuple[int, ...] = ()
    token_sources: bool = False
