"""Routes that the OpenAI and Anthropic APIs have and this server has not, refused by name.

A client that calls one learns what is missing, which a bare 404 would not tell.
"""

from __future__ import annotations

from collections.abc import Mapping

from flare_ray.errors import InvalidRequest

REFUSED: Mapping[str, str] = {
    "embeddings": "embeddings",
    "audio": "speech and transcription",
    "images": "image generation",
    "videos": "video generation",
    "moderations": "moderation",
    "files": "file storage",
    "uploads": "file storage",
    "batches": "batch jobs",
    "messages/batches": "batch jobs",
    "responses": "stored responses (POST /v1/responses answers without storing)",
    "fine_tuning": "fine-tuning",
    "assistants": "assistants",
    "threads": "assistants",
    "vector_stores": "vector stores",
    "conversations": "stored conversations",
    "containers": "containers",
    "evals": "evaluations",
    "realtime": "realtime sessions",
    "chatkit": "chat sessions",
    "complete": "the old text completion of the Anthropic API (use /v1/messages)",
    "engines": "engines (use /v1/models)",
    "edits": "edits",
    "rerank": "reranking",
    "score": "scoring",
    "classify": "classification",
    "pooling": "pooling",
    "organization": "administration",
    "skills": "skills",
}
"""First part of the path behind /v1/ -> what it would be."""


def refusal(path: str) -> InvalidRequest:
    """The failure for `path`, one of `REFUSED` or below it."""
    rest = path.removeprefix("/v1/")
    name = next(
        n for n in sorted(REFUSED, key=len, reverse=True) if (rest + "/").startswith(n + "/")
    )
    return InvalidRequest(
        f"/v1/{name}: this server has no {REFUSED[name]}; it generates text: see "
        "/v1/chat/completions, /v1/completions, /v1/responses and /v1/messages",
        code="unsupported_endpoint",
        status=404,
    )
