"""The openai package of Node under the interface of the client drivers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.rules.sources import ROOT
from tests.support.client_drivers import LIMIT_S, Question, Refused, Reply, chat_fields, chat_reply

SCRIPT = ROOT / "tests" / "serve" / "node" / "client.cjs"
PACKAGE = "openai@7.59.0"
FOLDER_VARIABLE = "FLARE_NODE_MODULES"
INSTALL_LIMIT_S = 90.0


class Absent(Exception):
    """Why the package cannot be had."""


def node_modules(folder: Path) -> Path:
    """A node_modules folder with the package: the one that FLARE_NODE_MODULES names, or a new one
    in `folder`, which npm fills.

    Raises:
        Absent: there is no node, or npm does not get it.
    """
    if shutil.which("node") is None:
        raise Absent("node is not installed")
    named = os.environ.get(FOLDER_VARIABLE)
    if named is not None:
        if not (Path(named) / "openai").is_dir():
            raise Absent(f"{FOLDER_VARIABLE} names no node_modules folder with openai in it")
        return Path(named)
    if shutil.which("npm") is None:
        raise Absent(f"npm is not installed, and {FOLDER_VARIABLE} names no folder")
    command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund"]
    command += ["--ignore-scripts", PACKAGE]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Absent(f"npm did not get {PACKAGE} in {INSTALL_LIMIT_S:g} s") from None
    if found.returncode:
        raise Absent(f"npm does not get {PACKAGE}: {found.stderr.strip()[-300:]}")
    return folder / "node_modules"


class OpenAiNode:
    """One process a call.

    Args:
        url: of the server, without a path.
        modules: a folder with the package.
    """

    lacks: Mapping[str, str] = {}

    def __init__(self, url: str, modules: Path) -> None:
        self._url, self._environment = url, {**os.environ, "NODE_PATH": str(modules)}
        self._leaving: subprocess.Popen[str] | None = None

    def ask(self, question: Question, *, stream: bool) -> Reply:
        command = self._command("stream" if stream else "ask", question)
        found = subprocess.run(
            command,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert found.returncode == 0, found.stderr
        told: dict[str, Any] = json.loads(found.stdout)
        if "status" in told:
            raise Refused(told["status"], told["message"])
        tokens = None if stream else tuple(told["tokens"])
        return chat_reply(told["choice"], pieces=told.get("pieces", 1), tokens=tokens)

    def leave(self, question: Question, while_open: Callable[[], None]) -> None:
        # It lives on until `close`, so that it is the stream's end that frees the request.
        process = self._leaving = subprocess.Popen(
            self._command("leave", question),
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        while_open()
        process.stdin.write("go\n")
        process.stdin.flush()

    def close(self) -> None:
        """End the process that left a stream."""
        if self._leaving is not None:
            self._leaving.communicate(timeout=LIMIT_S)
            assert self._leaving.returncode == 0

    def _command(self, action: str, question: Question) -> list[str]:
        fields = json.dumps(chat_fields(question))
        return ["node", str(SCRIPT), self._url, action, fields]
