"""From what a client wrote to what the device runs: sampling parameters and stops (contract: S2,
S3)."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import msgspec

from flare_ray.contracts.grammar import GrammarSpec
from flare_ray.contracts.manifest import SamplingDefaults
from flare_ray.contracts.plan import (
    ALWAYS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_EOS_IDS,
    MAX_LOGIT_RULES,
    MAX_TOP_LOGPROBS,
    LogitRule,
)
from flare_ray.contracts.request import GenerationRequest, SamplingParams, SamplingSpec
from flare_ray.errors import InvalidRequest
from flare_ray.rng import MASK64

GREEDY_BELOW_TEMPERATURE = 1e-10
"""Below it a request runs greedily. float32 logits of magnitude 0.01 or more that differ at all
differ by 1e-9, which such a temperature turns into odds of e**10 or more; dividing by anything
smaller could only overflow."""
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
"""Bounds of the held-back text and of the search per round."""
MAX_STOP_SEQUENCES = 16
MAX_STOP_SEQUENCE_TOKENS = 64
MAX_STOP_TOKEN_IDS = 96
MAX_LOGIT_BIAS = MAX_LOGIT_RULES - MAX_STOP_TOKEN_IDS - MAX_EOS_IDS
"""Biased tokens; min_tokens needs a rule for each token that could end the output."""
MAX_REPETITION_PENALTY = 100.0
BIAS_RANGE = 100.0
PENALTY_RANGE = 2.0
"""The ranges OpenAI documents."""


class ResolvedSampling(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a `GenerationRequest` that sampling parameters decide, all checked."""

    sampling: SamplingSpec
    max_tokens: int
    stop: tuple[bytes, ...]
    include_stop: bool
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    top_logprobs: int = -1
    prompt_logprobs: int = -1
    grammar: GrammarSpec | None = None


def resolve(
    params: SamplingParams,
    defaults: SamplingDefaults,
    *,
    vocab_size: int,
    prompt_tokens: int,
    context_tokens: int,
) -> ResolvedSampling:
    """Check `params`, fill in the checkpoint's `defaults` and a fresh random seed.

    Temperature 0, and any below GREEDY_BELOW_TEMPERATURE, becomes top-k 1 at temperature 1: the
    sampler is then deterministic. top_k -1, 0 or >= vocab_size switches the filter off.
    max_tokens None means all that the context leaves. Where `reproducible` is open the deployment
    decides: by default a request with a seed is (contract: S4).

    Args:
        prompt_tokens: length of the prompt.
        context_tokens: longest prompt plus output.
    Raises:
        InvalidRequest: a value is out of its range; `param` names the field.
    """
    max_tokens = _max_tokens(params.max_tokens, prompt_tokens, context_tokens)
    if not 0 <= params.min_tokens <= max_tokens:
        raise InvalidRequest(
            f"min_tokens must lie between 0 and max_tokens {max_tokens}, got {params.min_tokens}",
            param="min_tokens",
        )
    return ResolvedSampling(
        sampling=_sampling_spec(params, defaults, vocab_size),
        max_tokens=max_tokens,
        stop=_stop_bytes(params.stop),
        include_stop=params.include_stop_str_in_output,
        stop_token_ids=_stop_token_ids(params.stop_token_ids, vocab_size),
        ignore_eos=params.ignore_eos,
        stop_sequences=_stop_sequences(params.stop_token_sequences, vocab_size),
        top_logprobs=_alternatives("logprobs", params.logprobs),
        prompt_logprobs=_alternatives("prompt_logprobs", params.prompt_logprobs),
        grammar=_grammar(params),
    )


def _sampling_spec(
    params: SamplingParams, defaults: SamplingDefaults, vocab_size: int
) -> SamplingSpec:
    temperature = _number("temperature", params.temperature, defaults.temperature)
    if temperature < 0:
        raise InvalidRequest(
            f"temperature must be 0 or greater, got {temperature:g}", param="temperature"
        )
    top_p = _number("top_p", params.top_p, defaults.top_p)
    if not 0 < top_p <= 1:
        raise InvalidRequest(
            f"top_p must be greater than 0 and at most 1, got {top_p:g}", param="top_p"
        )
    min_p = _number("min_p", params.min_p, defaults.min_p)
    if not 0 <= min_p < 1:
        raise InvalidRequest(f"min_p must be at least 0 and below 1, got {min_p:g}", param="min_p")
    top_k = _top_k(params.top_k, defaults.top_k, vocab_size)
    if temperature < GREEDY_BELOW_TEMPERATURE:
        temperature, top_k, top_p, min_p = 1.0, 1, 1.0, 0.0
    repetition = _number("repetition_penalty", params.repetition_penalty, 1.0)
    if not 0 < repetition <= MAX_REPETITION_PENALTY:
        raise InvalidRequest(
            f"repetition_penalty must be greater than 0 and at most {MAX_REPETITION_PENALTY:g}, "
            f"got {repetition:g}",
            param="repetition_penalty",
        )
    return SamplingSpec(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=_seed(params.seed),
        repetition_penalty=repetition,
        presence_penalty=_penalty("presence_penalty", params.presence_penalty),
        frequency_penalty=_penalty("frequency_penalty", params.frequency_penalty),
        logit_bias=_logit_bias(params.logit_bias, vocab_size),
        min_tokens=params.min_tokens,
        bad_words=_bad_words(params.bad_words, vocab_size),
        reproducible=_reproducible(params, defaults),
    )


def _reproducible(params: SamplingParams, defaults: SamplingDefaults) -> bool:
    if params.reproducible is not None:
        return params.reproducible
    if defaults.reproducible == "seeded":
        return params.seed is not None
    return defaults.reproducible == "always"


def _alternatives(param: str, value: int | None) -> int:
    if value is None:
        return -1
    if not 0 <= value <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"{param} must lie between 0 and {MAX_TOP_LOGPROBS}, got {value}", param=param
        )
    return value


def logit_rules(request: GenerationRequest, eos_ids: tuple[int, ...]) -> tuple[LogitRule, ...]:
    """What the device adds to logits: the request's bias, and bans that hold min_tokens.

    The row at position P draws output token number P + 2 - (prompt tokens), counted from one.

    Args:
        eos_ids: the checkpoint's terminal tokens.
    """
    sampling = request.sampling
    rules = [LogitRule(token, addend, ALWAYS) for token, addend in sampling.logit_bias]
    if sampling.min_tokens:
        before = len(request.prompt_tokens) - 1 + sampling.min_tokens
        enders = set(request.stop_token_ids).union(() if request.ignore_eos else eos_ids)
        rules += [LogitRule(token, -math.inf, before) for token in sorted(enders)]
    return tuple(rules)


def seen_bits(tokens: Sequence[int], vocab_size: int) -> bytes:
    """One bit per token id, set for those among `tokens`; as `SlotInit.seen`."""
    bits = bytearray((vocab_size + 7) // 8)
    for token in set(tokens):
        bits[token >> 3] |= 1 << (token & 7)
    return bytes(bits)


def _grammar(params: SamplingParams) -> GrammarSpec | None:
    if params.grammar is not None and params.ignore_eos:
        raise InvalidRequest(
            "ignore_eos cannot be combined with a grammar, whose end is the output's end; leave "
            "one of them out",
            param="ignore_eos",
        )
    return params.grammar


def _penalty(param: str, value: float) -> float:
    penalty = _number(param, value, 0.0)
    if not -PENALTY_RANGE <= penalty <= PENALTY_RANGE:
        raise InvalidRequest(
            f"{param} must lie between {-PENALTY_RANGE:g} and {PENALTY_RANGE:g}, got {penalty:g}",
            param=param,
        )
    return penalty


def _logit_bias(
    bias: tuple[tuple[int, float], ...], vocab_size: int
) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias may name {MAX_LOGIT_BIAS} tokens, got {len(bias)}", param="logit_bias"
        )
    for token, addend in bias:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"logit_bias: token ids must lie in 0..{vocab_size - 1}, got {token}",
                param="logit_bias",
            )
        if not -BIAS_RANGE <= addend <= BIAS_RANGE:
            raise InvalidRequest(
                f"logit_bias: values must lie between {-BIAS_RANGE:g} and {BIAS_RANGE:g}, got "
                f"{addend:g} for token {token}",
                param="logit_bias",
            )
    return bias


def _bad_words(words: tuple[tuple[int, ...], ...], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words may come to {MAX_BAD_WORDS} token sequences (a word counts once as it is "
            f"and once after a space), got {len(words)}",
            param="bad_words",
        )
    for word in words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"bad_words: a word may have 1 to {MAX_BAD_WORD_TOKENS} tokens, got {len(word)}",
                param="bad_words",
            )
        if not all(0 <= token < vocab_size for token in word):
            raise InvalidRequest(
                f"bad_words: token ids must lie in 0..{vocab_size - 1}", param="bad_words"
            )
    if len({word for word in words if len(word) == 1}) >= vocab_size:
        raise InvalidRequest("bad_words bans every token", param="bad_words")
    return words


def _number(param: str, value: float | None, default: float) -> float:
    if value is None:
        return default
    if not math.isfinite(value):
        raise InvalidRequest(f"{param} must be a finite number, got {value}", param=param)
    return float(value)


def _top_k(value: int | None, default: int, vocab_size: int) -> int:
    top_k = default if value is None else value
    if top_k < -1:
        raise InvalidRequest(
            f"top_k must be positive, or 0 or -1 to switch it off, got {top_k}", param="top_k"
        )
    return top_k if 0 < top_k < vocab_size else 0


def _seed(value: int | None) -> int:
    if value is None:
        return secrets.randbits(64)
    if not -(1 << 63) <= value <= MASK64:
        raise InvalidRequest(
            f"seed must fit in 64 bits (-2**63 to 2**64 - 1), got {value}", param="seed"
        )
    return value & MASK64


def _max_tokens(value: int | None, prompt_tokens: int, context_tokens: int) -> int:
    room = context_tokens - prompt_tokens
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {prompt_tokens} tokens and the context is {context_tokens} tokens: no "
            "room is left for output; shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    if value is None:
        return room
    if value < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, got {value}", param="max_tokens")
    if value > room:
        raise InvalidRequest(
            f"max_tokens {value} and the prompt's {prompt_tokens} tokens exceed the context of "
            f"{context_tokens} tokens; ask for at most {room}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return value


def _stop_bytes(stop: tuple[str, ...]) -> tuple[bytes, ...]:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"at most {MAX_STOP_STRINGS} stop strings are taken, got {len(stop)}", param="stop"
        )
    encoded = []
    for text in stop:
        if not text:
            raise InvalidRequest("a stop string must not be empty", param="stop")
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"stop string {text!r} is no valid Unicode text (lone surrogate)", param="stop"
            ) from error
        if len(data) > MAX_STOP_BYTES:
            raise InvalidRequest(
                f"a stop string may have {MAX_STOP_BYTES} bytes in UTF-8, got {len(data)}",
                param="stop",
            )
        encoded.append(data)
    return tuple(encoded)


def _stop_token_ids(ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids are taken, got {len(ids)}",
            param="stop_token_ids",
        )
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"stop_token_ids must lie in 0..{vocab_size - 1}, got {token}",
                param="stop_token_ids",
            )
    return tuple(ids)


def _stop_sequences(
    sequences: tuple[tuple[int, ...], ...], vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    param = "stop_token_sequences"
    if len(sequences) > MAX_STOP_SEQUENCES:
        raise InvalidRequest(
            f"at most {MAX_STOP_SEQUENCES} {param} are taken, got {len(sequences)}", param=param
        )
    for sequence in sequences:
        if not 1 <= len(sequence) <= MAX_STOP_SEQUENCE_TOKENS:
            raise InvalidRequest(
                f"{param}: a sequence may have 1 to {MAX_STOP_SEQUENCE_TOKENS} tokens, got "
                f"{len(sequence)}",
                param=param,
            )
        if not all(0 <= token < vocab_size for token in sequence):
            raise InvalidRequest(f"{param}: token ids must lie in 0..{vocab_size - 1}", param=param)
    return tuple(tuple(sequence) for sequence in sequences)
