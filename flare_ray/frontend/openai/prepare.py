"""From a checked request body to generations: render, tokenise, bound, resolve.

Nothing here touches an engine; whatever is wrong with a request is raised before one hears of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from flare_ray.contracts.grammar import GrammarSpec
from flare_ray.contracts.plan import MAX_BAD_WORDS
from flare_ray.contracts.request import GenerationRequest
from flare_ray.controller.sampling import resolve
from flare_ray.errors import InvalidRequest
from flare_ray.frontend.client import EngineInfo
from flare_ray.frontend.detokenize import IncrementalDetokenizer
from flare_ray.frontend.openai.messages import normalise_messages, normalise_tools
from flare_ray.frontend.openai.requests import ChatBody, CompletionBody, parse_body
from flare_ray.frontend.openai.structured import (
    ChatPrompt,
    answer_source,
    chat_grammar,
    tool_use,
)
from flare_ray.frontend.settings import ApiSettings
from flare_ray.rng import choice_seed


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as its answer repeats it."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to be opened.

    Attributes:
        response_id: id of the response and of every chunk.
        requests: one generation per choice, in the order of their indices; empty where no token
            was asked for.
        prompt_tokens: prompt length per choice.
        logprobs: report log-probabilities.
        echoes: the prompt of each choice where its text begins with it, else ().
        prompt_logprobs: alternatives reported with every prompt token; -1 = none are.
        token_sources: tell which source every piece of text came from.
        discards: the choices run for their prompts alone: what they generate is nobody's.
        choices_per_prompt: neighbouring choices that share a prompt, which is billed once.
        stream: answer with server-sent events.
        include_usage: end the stream with a usage chunk.
        tools: parameter schema by function name; None = calls are not parsed.
        inside_reasoning: the prompt ends inside reasoning.
        data_answer: an answer that does not begin with a call is data: tags in it are text.
        user: the client's own name for its end user, for the log.
        priority / cache_salt: as the client asked; its key may allow others.
    """

    response_id: str
    requests: tuple[GenerationRequest, ...]
    prompt_tokens: tuple[int, ...]
    stream: bool
    include_usage: bool
    tools: Mapping[str, Mapping[str, Any]] | None = None
    inside_reasoning: bool = False
    data_answer: bool = False
    logprobs: bool = False
    choices_per_prompt: int = 1
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    echoes: tuple[Echo, ...] = ()
    prompt_logprobs: int = -1
    discards: bool = False
    token_sources: bool = False

    def under(self, response_id: str) -> Prepared:
        """The same under another id; of requests with one choice."""
        (request,) = self.requests
        request = msgspec.structs.replace(request, request_id=response_id)
        return replace(self, response_id=response_id, requests=(request,))


async def prepare_chat(
    settings: ApiSettings, info: EngineInfo, body: Mapping[str, Any], *, unique_id: str
) -> Prepared:
    """A /v1/chat/completions body.

    Raises:
        InvalidRequest: anything is wrong with it.
    """
    check_model(settings, body)
    chat = parse_body(ChatBody, body)
    messages = normalise_messages(chat.messages)
    declared = normalise_tools(chat.tools)
    use = tool_use(chat.tool_choice, declared)
    if use.shown and not settings.chat.tool_open:
        raise InvalidRequest(
            "tools: this model has no tool calls; leave tools out, or send tool_choice: none",
            param="tools",
            code="unsupported_parameter",
        )
    options = template_options(settings, chat)
    tools = declared if use.shown else None
    rendered, tokens = await settings.pool.run(
        lambda: settings.codec.encode_chat(messages, tools=tools, options=options)
    )
    budget = chat.output_budget()
    budget_name = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    response_id = f"chatcmpl-{unique_id}"
    inside_reasoning = settings.chat.prompt_opens_reasoning and rendered.rstrip().endswith(
        settings.chat.reasoning_open
    )
    source = answer_source(chat)
    grammar = chat_grammar(
        source,
        declared,
        use,
        parallel=chat.parallel_tool_calls is not False,
        prompt=ChatPrompt(settings.chat, inside_reasoning),
    )
    predicted = await _predicted(settings, chat)
    banned = await _banned(settings, chat)
    names = _Names(response_id, budget, budget_name, "messages", banned, grammar, predicted)
    choices = chat.choices()
    requests = _spread(_generation(chat, info, tokens, names), choices)
    return Prepared(
        response_id=response_id,
        requests=requests,
        prompt_tokens=(len(tokens),) * choices,
        logprobs=chat.alternatives() >= 0,
        choices_per_prompt=choices,
        stream=bool(chat.stream),
        include_usage=chat.wants_usage,
        tools=_schemas(declared) if use.shown else None,
        inside_reasoning=inside_reasoning,
        data_answer=source is not None,
        user=chat.user,
        priority=chat.priority,
        cache_salt=chat.cache_salt,
        prompt_logprobs=_given(chat.prompt_logprobs),
        token_sources=bool(chat.return_token_sources),
    )


async def prepare_completion(
    settings: ApiSettings, info: EngineInfo, body: Mapping[str, Any], *, unique_id: str
) -> Prepared:
    """A /v1/completions body. `max_tokens: 0` is answered with no text, and no engine work unless
    the prompt's own log-probabilities are asked for.

    Raises:
        InvalidRequest: anything is wrong with it.
    """
    check_model(settings, body)
    completion = parse_body(CompletionBody, body)
    prompts = completion.prompts()
    encode = settings.codec.encode_prompt
    token_lists = await settings.pool.run(
        lambda: [encode(p) if isinstance(p, str) else p for p in prompts]
    )
    response_id = f"cmpl-{unique_id}"
    banned = await _banned(settings, completion)
    source = answer_source(completion)
    grammar = None if source is None else GrammarSpec(kind=source.kind, source=source.source)
    choices = completion.choices(len(prompts))
    requests: list[GenerationRequest] = []
    for i, tokens in enumerate(token_lists):
        path = "prompt" if len(token_lists) == 1 else f"prompt[{i}]"
        _check_ids(tokens, info, path)
        request_id = response_id if len(token_lists) == 1 else f"{response_id}-{i}"
        # A budget of nothing still has every other parameter checked, with a budget of one.
        budget = 1 if completion.max_tokens == 0 else completion.max_tokens
        names = _Names(request_id, budget, "max_tokens", path, banned, grammar)
        requests += _spread(_generation(completion, info, tokens, names), choices)
    scored = any(request.prompt_logprobs >= 0 for request in requests)
    echoes = [_echo(settings, *pair) for pair in zip(prompts, token_lists, strict=True)]
    return Prepared(
        response_id=response_id,
        requests=() if completion.max_tokens == 0 and not scored else tuple(requests),
        prompt_tokens=tuple(len(tokens) for tokens in token_lists for _ in range(choices)),
        logprobs=completion.alternatives() >= 0,
        choices_per_prompt=choices,
        stream=bool(completion.stream),
        include_usage=completion.wants_usage,
        user=completion.user,
        priority=completion.priority,
        cache_salt=completion.cache_salt,
        echoes=tuple(e for e in echoes for _ in range(choices)) if completion.echo else (),
        prompt_logprobs=_given(completion.prompt_logprobs),
        discards=completion.max_tokens == 0,
        token_sources=bool(completion.return_token_sources),
    )


def _echo(settings: ApiSettings, prompt: str | list[int], tokens: Sequence[int]) -> Echo:
    """The prompt as it was given, or the text of its tokens."""
    if isinstance(prompt, str):
        return Echo(prompt, tuple(tokens))
    detokenizer = IncrementalDetokenizer(settings.codec.token_bytes)
    return Echo(detokenizer.push(tokens) + detokenizer.finish(), tuple(tokens))


def _given(alternatives: int | None) -> int:
    return -1 if alternatives is None else alternatives


def _scored(body: ChatBody | CompletionBody) -> int:
    """Alternatives that the engine must report with prompt tokens: for an echo, or by name."""
    echoed = isinstance(body, CompletionBody) and body.echo
    return max(_given(body.prompt_logprobs), body.alternatives() if echoed else -1)


def _spread(request: GenerationRequest, choices: int) -> tuple[GenerationRequest, ...]:
    """The request once per choice, each with random streams of its own (contract: S4)."""
    if choices == 1:
        return (request,)
    return tuple(
        msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}-c{choice}",
            sampling=msgspec.structs.replace(
                request.sampling, seed=choice_seed(request.sampling.seed, choice)
            ),
        )
        for choice in range(choices)
    )


def template_options(settings: ApiSettings, chat: ChatBody) -> dict[str, Any]:
    """Values for the template's own variables, from `reasoning_effort` and `chat_template_kwargs`.

    Raises:
        InvalidRequest: the checkpoint has no template, the template does not read a variable, or
            the effort is none it tells apart.
    """
    template = settings.codec.template
    if template is None:
        raise InvalidRequest(
            "this model has no chat template; use /v1/completions", code="no_chat_template"
        )
    options = dict(chat.chat_template_kwargs or {})
    for name in sorted(set(options) - template.variables):
        raise InvalidRequest(
            f"chat_template_kwargs.{name}: the model's template does not read it; it reads "
            f"{', '.join(sorted(template.variables)) or 'no variables'}",
            param=f"chat_template_kwargs.{name}",
            code="unknown_parameter",
        )
    where = "chat_template_kwargs.reasoning_effort"
    if chat.reasoning_effort is not None:
        given = options.setdefault("reasoning_effort", chat.reasoning_effort)
        where = "reasoning_effort"
        if given != chat.reasoning_effort:
            raise InvalidRequest(
                "reasoning_effort and chat_template_kwargs.reasoning_effort differ; send one",
                param=where,
            )
    known = settings.chat.reasoning_efforts
    if "reasoning_effort" in options and options["reasoning_effort"] not in known:
        raise InvalidRequest(
            f"{where}: must be one of {', '.join(known)}, got {options['reasoning_effort']!r}"
            if known
            else f"{where}: this model has no such setting; leave it out",
            param=where,
            code="unsupported_parameter",
        )
    return options


def check_served(settings: ApiSettings, model: str) -> None:
    """Refuse a name this server does not serve.

    Raises:
        InvalidRequest: status 404, code model_not_found.
    """
    if model != settings.model_name:
        raise InvalidRequest(
            f"the model {model[:200]!r} does not exist here; this server has "
            f"{settings.model_name!r}",
            param="model",
            code="model_not_found",
            status=404,
        )


@dataclass(frozen=True, slots=True)
class _Names:
    """Identity and budget of one generation, what to call its parts in errors, its banned token
    sequences and what is predicted of it."""

    request_id: str
    max_tokens: int | None
    budget: str
    prompt: str
    bad_words: tuple[tuple[int, ...], ...]
    grammar: GrammarSpec | None = None
    prediction: tuple[int, ...] = ()


async def _banned(
    settings: ApiSettings, body: ChatBody | CompletionBody
) -> tuple[tuple[int, ...], ...]:
    words = body.bad_words or []
    if not words:
        return ()
    if len(words) > MAX_BAD_WORDS or "" in words:
        raise InvalidRequest(
            f"bad_words: at most {MAX_BAD_WORDS} words, none of them empty", param="bad_words"
        )
    return await settings.pool.run(lambda: settings.codec.encode_words(words))


async def _predicted(settings: ApiSettings, chat: ChatBody) -> tuple[int, ...]:
    """Ids of the predicted output as the model would spell it, tags in it as plain text."""
    if chat.prediction is None or not chat.prediction.text:
        return ()
    text = chat.prediction.text
    return tuple(await settings.pool.run(lambda: settings.codec.encode_plain(text)))


def check_model(settings: ApiSettings, body: Mapping[str, Any]) -> None:
    """Refuse a body for another model, before anything else: that has other parameters.

    Raises:
        InvalidRequest: as `check_served`.
    """
    model = body.get("model")
    if isinstance(model, str):
        check_served(settings, model)


def _check_ids(tokens: Sequence[int], info: EngineInfo, path: str) -> None:
    if not tokens:
        raise InvalidRequest(f"{path}: must not be empty", param=path)
    wrong = next((t for t in tokens if not 0 <= t < info.vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(
            f"{path}: token ids must lie in 0..{info.vocab_size - 1}, got {wrong}", param=path
        )


def _generation(
    body: ChatBody | CompletionBody, info: EngineInfo, tokens: Sequence[int], names: _Names
) -> GenerationRequest:
    limit = min(info.max_prompt_tokens, info.context_tokens - 1)
    if len(tokens) > limit:
        raise InvalidRequest(
            f"{names.prompt}: the prompt has {len(tokens)} tokens, this model takes at most "
            f"{limit} (context {info.context_tokens} tokens); shorten the prompt",
            param=names.prompt,
            code="context_length_exceeded",
        )
    try:
        resolved = resolve(
            body.sampling_params(names.max_tokens, names.bad_words, names.grammar),
            info.sampling_defaults,
            vocab_size=info.vocab_size,
            prompt_tokens=len(tokens),
            context_tokens=info.context_tokens,
        )
    except InvalidRequest as error:
        if error.param == "max_tokens" and names.budget != "max_tokens":
            message = str(error).replace("max_tokens", names.budget, 1)
            raise InvalidRequest(message, param=names.budget, code=error.code) from error
        raise
    return GenerationRequest(
        request_id=names.request_id,
        prompt_tokens=tuple(tokens),
        sampling=resolved.sampling,
        max_tokens=resolved.max_tokens,
        stop=resolved.stop,
        include_stop=resolved.include_stop,
        stop_token_ids=resolved.stop_token_ids,
        ignore_eos=resolved.ignore_eos,
        stop_sequences=resolved.stop_sequences,
        top_logprobs=body.alternatives(),
        prompt_logprobs=_scored(body),
        grammar=resolved.grammar,
        prediction=names.prediction,
        token_sources=bool(body.return_token_sources),
    )


def _schemas(declared: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in declared}
