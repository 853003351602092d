"""Users of `locust`: one chats in streams, one completes texts, some leave."""

import json

from locust import FastHttpUser, constant, task

MODEL = "glm-demo"
LONG_TOKENS = 3000
"""More than the server makes in the whole run: requests that were left must not go on."""
PART_BYTES = 200


class Talker(FastHttpUser):
    """Reads whole answers; an answer that is not whole is a failure."""

    wait_time = constant(0.05)

    @task(3)
    def chat(self):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Write a python function that adds numbers."}],
            "max_tokens": 40,
            "stream": True,
        }
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, catch_response=True
        ) as answer:
            text = "".join(answer.iter_content(1024))
            if not text.endswith("data: [DONE]\n\n"):
                answer.failure(f"the stream is not whole: {text[-100:]!r}")

    @task(2)
    def complete(self):
        body = {"model": MODEL, "prompt": "def add(", "max_tokens": 24, "ignore_eos": True}
        with self.client.post("/v1/completions", json=body, catch_response=True) as answer:
            usage = json.loads(answer.text).get("usage") or {}
            if usage.get("completion_tokens") != 24:
                answer.failure(f"not 24 tokens: {answer.text[:100]!r}")

    @task(1)
    def leave(self):
        body = {"model": MODEL, "prompt": "def add(", "max_tokens": LONG_TOKENS, "stream": True}
        with self.client.post(
            "/v1/completions",
            json={**body, "ignore_eos": True},
            name="/v1/completions (left)",
            stream=True,
            catch_response=True,
        ) as answer:
            if not answer.stream.read(PART_BYTES):
                answer.failure("nothing was streamed")
            answer.stream.release()
