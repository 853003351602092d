"""What the scripted engine answers to the page's tests: chosen by the last of the words below that
stands in the prompt."""

from __future__ import annotations

from flare_ray.contracts.messages import Delta, Failed, Finished, TokenSource
from flare_ray.contracts.request import GenerationRequest
from tests.support.client_script import prompt_text
from tests.support.fake_engine_client import Step, answer, byte_tokens

PIECES = (
    (TokenSource.TARGET, "a limb "),
    (TokenSource.DRAFTER, "of a "),
    (TokenSource.OWN_TEXT, "tree, "),
    (TokenSource.HISTORY, "or of "),
    (TokenSource.PREDICTION, "a né €🙂 "),
    (TokenSource.GRAMMAR, "debt"),
)
"""Content of the answer to SOURCES; its reasoning is REASONING."""
REASONING = ((TokenSource.TARGET, "let me "), (TokenSource.DRAFTER, "think"))
SOURCES, SLOW, MARKUP, FAIL, WIDE = "SOURCES", "SLOW", "MARKUP", "FAIL", "WIDE"
LONG = "LONG"
CALL, HALF = "CALL", "HALF"
"""A call; one that the budget cuts off."""
HOSTILE = "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=1</script><b id='no'>b</b>"
HOSTILE_CALL = (
    f"<tool_call>weather<arg_key>city</arg_key><arg_value>{HOSTILE}</arg_value></tool_call>"
)
HALF_CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Rom"
RESULT, VERDICT = "22 degrees", "It is warm."
WORD = "w" * 60
LONG_PIECES = 5000
ACCEPTED, OFFERED, CACHED = 30, 50, 7


def page_script(request: GenerationRequest) -> list[Step]:
    """See the constants above."""
    prompt = prompt_text(request)
    asked = max((SOURCES, SLOW, LONG, MARKUP, FAIL, WIDE, CALL, HALF, RESULT), key=prompt.rfind)
    if asked == RESULT:
        return answer(f"</think>{VERDICT}")(request)
    if asked == SLOW:
        return [*_pieces(request, "</think>"), *_slowly(request)]
    if asked == LONG:
        return _long(request)
    if asked == MARKUP:
        return answer(f"{HOSTILE}</think>{HOSTILE}")(request)
    if asked == CALL:
        return answer(f"</think>{HOSTILE_CALL}")(request)
    if asked == HALF:
        return answer(f"</think>{HALF_CALL}", reason="length")(request)
    if asked == FAIL:
        failed = Failed(request.request_id, "rank_failure", f"rank 1 is gone {HOSTILE}", 503)
        return [*_pieces(request, "</think>some text"), failed]
    if asked == WIDE:
        return answer(f"{WORD}</think>{WORD}")(request)
    return _sourced(request)


def _sourced(request: GenerationRequest) -> list[Step]:
    steps: list[Step] = []
    for source, text in (*REASONING, (TokenSource.TARGET, "</think>"), *PIECES):
        steps += [*_pieces(request, text, source), 0.03]
    return [
        *steps,
        Finished(
            request.request_id,
            "stop",
            len(request.prompt_tokens),
            61,
            cached_tokens=CACHED,
            drafts_offered=OFFERED,
            drafts_accepted=ACCEPTED,
        ),
    ]


def _pieces(
    request: GenerationRequest, text: str, source: TokenSource = TokenSource.TARGET
) -> list[Step]:
    tokens = byte_tokens(text)
    sources = bytes([source]) * len(tokens) if request.token_sources else b""
    return [Delta(request.request_id, tokens, sources=sources)]


def _slowly(request: GenerationRequest) -> list[Step]:
    steps: list[Step] = []
    for number in range(5000):
        steps += [*_pieces(request, f"{number} "), 0.02]
    return steps


def _long(request: GenerationRequest) -> list[Step]:
    """Every piece is of another source than the one before it."""
    steps: list[Step] = [*_pieces(request, "</think>")]
    for number in range(LONG_PIECES):
        source = (TokenSource.TARGET, TokenSource.DRAFTER)[number % 2]
        steps += [*_pieces(request, "abc ", source), 0.001]
    return [*steps, Finished(request.request_id, "length", len(request.prompt_tokens), 4)]
