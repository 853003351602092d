"""API keys of a file: closed, compared in constant time, read again when the file changes.

The file is YAML or JSON. A key stands in it as it is, or as its SHA-256:

    keys:
      - name: team-a
        key: sk-0123456789abcdef0123
        requests_per_minute: 600
        tokens_per_minute: 200000
      - name: team-b
        key_sha256: 5e88...
        lowest_priority: -10
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from pydantic import Field, ValidationError, model_validator

from flare_ray.errors import ConfigError
from flare_ray.frontend.closed import Closed

logger = logging.getLogger("ray.serve.flare")

RELOAD_S = 1.0
"""Seconds between two looks at the file."""
KEY_PATTERN = r"^[!-~]{16,512}$"
"""What an HTTP header carries unchanged, and long enough that nobody guesses it."""


class ApiKey(Closed):
    """One key and what it is allowed."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="For logs and limits.")
    key: str | None = Field(None, pattern=KEY_PATTERN, description="The secret itself, or")
    key_sha256: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="the SHA-256 of its ASCII, in hexadecimal."
    )
    requests_per_minute: int | None = Field(None, ge=1, description="None = any number.")
    tokens_per_minute: int | None = Field(
        None, ge=1, description="Prompt and output tokens together; None = any number."
    )
    lowest_priority: int = Field(
        0,
        ge=-(2**31),
        lt=2**31,
        description="Priority of its requests, and the lowest (earliest) they may ask for.",
    )
    weight: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="Its share of an engine under load, relative to other keys' at the same "
        "priority.",
    )
    cache_salt: str = Field(
        "", max_length=64, description="Prefixes are shared among keys of equal salt."
    )

    @model_validator(mode="after")
    def _one_secret(self) -> ApiKey:
        if (self.key is None) == (self.key_sha256 is None):
            raise ValueError(f"key {self.name}: give either key or key_sha256")
        return self

    @property
    def digest(self) -> bytes:
        """SHA-256 of the secret."""
        if self.key is not None:
            return _digest(self.key)
        assert self.key_sha256 is not None
        return bytes.fromhex(self.key_sha256)


class KeyFile(Closed):
    """The document."""

    keys: list[ApiKey] = Field(min_length=1)

    @model_validator(mode="after")
    def _unique(self) -> KeyFile:
        names = [key.name for key in self.keys]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two keys have the name {name}")
        if len({key.digest for key in self.keys}) < len(self.keys):
            raise ValueError("two keys have the same secret")
        return self


class KeyRing:
    """Keys of a file that may change at any time.

    A file that cannot be used is logged, and the keys that were read last stay: a mistake neither
    locks everyone out nor lets anyone in.

    Args:
        clock: monotonic seconds.
    Raises:
        ConfigError: the file cannot be used at the start.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._seen = self._stamp()
        self._keys = _read(path)
        self._looked_s = clock()

    def find(self, secret: str) -> ApiKey | None:
        """The key with this secret. Takes the same time whichever it is, or none."""
        self._look()
        digest, found = _digest(secret), None
        for theirs, key in self._keys:
            if hmac.compare_digest(digest, theirs):
                found = key
        return found

    def _look(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_s < RELOAD_S:
            return
        self._looked_s = now_s
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._keys = _read(self._path)
        except ConfigError as error:
            logger.error("%s; the keys read before stay in force", error)
        else:
            logger.info("%s: %d API key(s) in force", self._path, len(self._keys))

    def _stamp(self) -> tuple[int, int, int] | None:
        """What changes with the file; a mounted secret is a link whose target is exchanged."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def _read(path: Path) -> list[tuple[bytes, ApiKey]]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        # The error itself quotes the file, and the file holds secrets.
        where = getattr(error, "problem_mark", None)
        line = "" if where is None else f", line {where.line + 1}"
        raise ConfigError(f"the key file {path} is not YAML{line}") from None
    try:
        keys = KeyFile.model_validate(document).keys
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        told = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in problems[:5])
        raise ConfigError(f"the key file {path}: {told}") from None
    return [(key.digest, key) for key in keys]


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", errors="surrogatepass")).digest()
