"""Renders a conversation with the checkpoint's template through transformers' sandbox.

The template is the checkpoint's property and is never edited here. What the frontend adds is that
control tokens which occur *inside* a client's strings are marked, so that they can be encoded as
the plain text they are (`tokenizer.py`): a document that quotes `<|end|>` must not end a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flare_ray.errors import CheckpointError, InvalidRequest

MARK_OPEN, MARK_CLOSE = "\U000f0f00", "\U000f0f01"
"""Private-use characters around a control token that a client wrote. Clients' own are removed."""

RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)
"""Template variables that the routes set themselves; `chat_template_kwargs` may not."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """One template.

    Attributes:
        source: Jinja text.
        constants: special tokens a template may name (`bos_token`, ...).
        control_tokens: token texts that are markup wherever the template writes them.
        variables: names the template reads and a client may set.
    """

    source: str
    constants: Mapping[str, str]
    control_tokens: tuple[str, ...]
    variables: frozenset[str]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        """Text of the conversation up to where the answer begins.

        Args:
            messages: normalised messages (`openai.messages`).
            tools: function declarations, or None.
            options: values for `variables`.
        Raises:
            InvalidRequest: the template refuses the conversation.
        """
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        mark = self._marker()
        try:
            # A pair: the texts, and token indices that are not asked for (its annotation says str).
            result: Any = render_jinja_template(
                conversations=[[_mapped(message, mark) for message in messages]],
                tools=None if tools is None else [_mapped(tool, mark) for tool in tools],
                chat_template=self.source,
                add_generation_prompt=True,
                **{**self.constants, **_mapped(options, mark)},
            )
        except TemplateError as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return str(result[0][0])

    def _marker(self) -> re.Pattern[str]:
        """Matches a control token or a stray mark; longer tokens first."""
        tokens = sorted(self.control_tokens, key=len, reverse=True)
        return re.compile("|".join(re.escape(t) for t in (MARK_OPEN, MARK_CLOSE, *tokens)))


def _mapped(value: Any, marker: re.Pattern[str]) -> Any:
    """A copy of `value` in which every string value (not key) has its control tokens marked."""
    if isinstance(value, str):
        return marker.sub(_marked, value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, marker) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, marker) for item in value]
    return value


def _marked(match: re.Match[str]) -> str:
    text = match.group()
    return "" if text in (MARK_OPEN, MARK_CLOSE) else f"{MARK_OPEN}{text}{MARK_CLOSE}"


def split_marked(rendered: str) -> list[tuple[str, bool]]:
    """Pieces of rendered text in order; True = a control token to be encoded as plain text.

    A template may cut a marked string (`split`, slices); a mark without its partner is dropped, and
    still separates the text on its two sides.
    """
    if MARK_OPEN not in rendered and MARK_CLOSE not in rendered:
        return [(rendered, False)]
    pieces = []
    pattern = re.compile(f"{MARK_OPEN}([^{MARK_OPEN}{MARK_CLOSE}]*){MARK_CLOSE}")
    position = 0
    for match in pattern.finditer(rendered):
        pieces.append((rendered[position : match.start()], False))
        pieces.append((match.group(1), True))
        position = match.end()
    pieces.append((rendered[position:], False))
    lone = re.compile(f"[{MARK_OPEN}{MARK_CLOSE}]")
    return [(part, plain) for text, plain in pieces for part in lone.split(text) if part]


def load_chat_template(folder: Path, control_tokens: Sequence[str]) -> ChatTemplate | None:
    """The template of a checkpoint folder: `chat_template.jinja`, else `tokenizer_config.json`.

    Args:
        folder: checkpoint.
        control_tokens: texts of its special tokens.
    Returns:
        None if the checkpoint has no template.
    Raises:
        CheckpointError: a template exists and cannot be read or compiled.
    """
    from jinja2 import Environment, TemplateSyntaxError, meta
    from jinja2.ext import loopcontrols

    config: dict[str, Any] = {}
    config_file = folder / "tokenizer_config.json"
    if config_file.is_file():
        try:
            config = json.loads(config_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{config_file} is not JSON: {error}") from error
    source = _template_source(folder, config)
    if source is None:
        return None
    try:
        tree = Environment(extensions=[loopcontrols, _generation_tag()]).parse(source)
    except TemplateSyntaxError as error:
        raise CheckpointError(f"the chat template of {folder} does not compile: {error}") from error
    constants = {
        name: value if isinstance(value, str) else value["content"]
        for name, value in config.items()
        if name.endswith("_token") and (isinstance(value, str) or _is_token_record(value))
    }
    # Names a template only ever assigns (loops, set) are not undeclared; helpers are functions.
    helpers = {"raise_exception", "strftime_now", "namespace", "range", "dict", "cycler", "joiner"}
    variables = meta.find_undeclared_variables(tree) - helpers - RESERVED_VARIABLES - set(constants)
    return ChatTemplate(source, constants, tuple(control_tokens), frozenset(variables))


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    if isinstance(template, list):
        for entry in template:
            if isinstance(entry, dict) and entry.get("name") == "default":
                return str(entry["template"])
    raise CheckpointError(
        f"chat_template in {folder / 'tokenizer_config.json'} is neither text nor a list with an "
        "entry named default"
    )


def _is_token_record(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content"), str)


def _generation_tag() -> type:
    """Jinja extension that lets `{% generation %}` parse; transformers defines it for rendering."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return GenerationTag
