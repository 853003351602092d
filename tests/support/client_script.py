"""What the scripted engine answers to the suites of client libraries: chosen by the request."""

from __future__ import annotations

from flare_ray.contracts.messages import Delta, Finished
from flare_ray.contracts.record import TokenScore
from flare_ray.contracts.request import GenerationRequest
from tests.support.fake_engine_client import Step, answer, byte_tokens

WEATHER_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome €</arg_value></tool_call>"
GREETING = "hello €"
RESULT = "22 degrees and sun"
"""A tool's result; once it is in the prompt, the answer is VERDICT."""
VERDICT = "It is sunny."
DOCUMENT = '{"city": "Rome"}'
"""The answer to a request that asks for a schema."""
ENDLESS = "never stop"
"""Asked for this, the engine answers until it is cancelled."""
_SPELLING = {byte_tokens(bytes([byte]))[0]: byte for byte in range(256)}


def prompt_text(request: GenerationRequest) -> str:
    """The prompt without its control tokens."""
    found = bytes(_SPELLING[t] for t in request.prompt_tokens if t in _SPELLING)
    return found.decode(errors="replace")


def client_script(request: GenerationRequest) -> list[Step]:
    """See the constants above."""
    prompt = prompt_text(request)
    if request.top_logprobs >= 0:
        return _scored(request)
    if request.grammar is not None:
        return answer(f"</think>{DOCUMENT}", step=2)(request)
    if ENDLESS in prompt:
        return answer("</think>" + "x" * 5000, step=1, pause=0.01)(request)
    if RESULT in prompt:
        return answer(f"</think>{VERDICT}", step=2)(request)
    if "weather" in prompt:
        return answer(f"</think>{CALL}{CALL}", step=4)(request)
    return answer(f"why</think>{GREETING}", step=2)(request)


def _scored(request: GenerationRequest) -> list[Step]:
    """Token number i has log-probability -i / 8, and so has its only alternative."""
    tokens = byte_tokens(f"</think>{GREETING}")
    scores = [TokenScore(-i / 8, (token,), (-i / 8,)) for i, token in enumerate(tokens)]
    return [
        Delta(request.request_id, tokens, 0, tuple(scores)),
        Finished(request.request_id, "stop", len(request.prompt_tokens), len(tokens) + 1),
    ]
