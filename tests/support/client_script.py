"""What the scripted engine answers to the suite of client libraries: chosen by the request."""

from __future__ import annotations

from flare_ray.contracts.messages import Delta, Finished
from flare_ray.contracts.record import TokenScore
from flare_ray.contracts.request import GenerationRequest
from tests.support.client_drivers import CITY_SCHEMA, ENDLESS, RESULT
from tests.support.fake_engine_client import Step, answer, byte_tokens

CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome €</arg_value></tool_call>"
GREETING = "hello €"
VERDICT = "It is sunny."
"""The answer once RESULT is in the prompt."""
DOCUMENT = '{"city": "Rome"}'
"""The answer to a request that asks for a schema."""
_SPELLING = {byte_tokens(bytes([byte]))[0]: byte for byte in range(256)}
assert "Rome" in CITY_SCHEMA["properties"]["city"]["enum"]


def prompt_text(request: GenerationRequest) -> str:
    """The prompt without its control tokens."""
    found = bytes(_SPELLING[t] for t in request.prompt_tokens if t in _SPELLING)
    return found.decode(errors="replace")


def client_script(request: GenerationRequest) -> list[Step]:
    """See the constants above."""
    prompt = prompt_text(request)
    if ENDLESS in prompt:
        return answer("</think>" + "x" * 5000, step=1, pause=0.01)(request)
    if request.top_logprobs >= 0:
        return _scored(request)
    if request.grammar is not None:
        return answer(f"</think>{DOCUMENT}", step=2)(request)
    if RESULT in prompt:
        return answer(f"</think>{VERDICT}", step=2)(request)
    if "weather" in prompt:
        return answer(f"</think>{CALL}{CALL}", step=4)(request)
    if request.max_tokens < 20:
        return answer(f"</think>{GREETING[:3]}", step=2, reason="length")(request)
    return answer(f"why</think>{GREETING}", step=2)(request)


def _scored(request: GenerationRequest) -> list[Step]:
    """Token number i has log-probability -i / 8, and so has its only alternative."""
    tokens = byte_tokens(f"</think>{GREETING}")
    scores = [TokenScore(-i / 8, (token,), (-i / 8,)) for i, token in enumerate(tokens)]
    return [
        Delta(request.request_id, tokens, 0, tuple(scores)),
        Finished(request.request_id, "stop", len(request.prompt_tokens), len(tokens) + 1),
    ]
