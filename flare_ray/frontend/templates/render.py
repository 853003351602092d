"""Renders a conversation with the checkpoint's template through transformers' sandbox.

The template is the checkpoint's, or the deployment's, and is never edited here. What the frontend
adds is that control tokens and tags which occur *inside* a client's strings are told apart from
those that the template writes, so that they can be encoded as the plain text they are
(`tokenizer.py`): a document that quotes `<|end|>` must not end a turn, one that quotes
`<tool_call>` must not open a call.

For that the conversation is rendered twice, as it is and with private-use characters around each
such token, and the second text without its marks must be the first, character by character: the
model reads what the template alone would have written, or the request is refused.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from flare_ray.config.deployment import is_inline_template
from flare_ray.errors import CheckpointError, ConfigError, InvalidRequest

FIRST_MARK, LAST_MARK = 0xF0F00, 0xFFFFD
"""Private-use characters from which marks are taken: the first two that a conversation lacks."""

RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)
"""Template variables that the routes set themselves; `chat_template_kwargs` may not."""

FOREIGN_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What Python raises inside a template that meets values it was not written for."""
TEMPLATE_FILE = "<template>"
"""Jinja's name, in tracebacks, for a template that was no file."""

Marks = tuple[str, str]
"""Characters before and after a token that a client wrote."""
Piece = tuple[str, bool]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """One template.

    Attributes:
        name: what to call it in messages.
        given: it is the deployment's, not the checkpoint's.
        source: Jinja text.
        constants: special tokens a template may name (`bos_token`, ...).
        control_tokens: texts of special tokens: markup wherever the template writes them.
        tags: texts of the other added tokens, such as `<think>`; the same, but that a template may
            look for them inside an assistant message.
        variables: names the template reads and a client may set.
    """

    name: str
    given: bool
    source: str
    constants: Mapping[str, str]
    control_tokens: tuple[str, ...]
    tags: tuple[str, ...]
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

        conversation: list[Any] = list(messages)
        declared: list[Any] | None = None if tools is None else list(tools)
        try:
            # A pair: the texts, and token indices that are not asked for (its annotation says str).
            result: Any = render_jinja_template(
                conversations=[conversation],
                tools=declared,
                chat_template=self.source,
                add_generation_prompt=True,
                **{**self.constants, **options},
            )
        except (TemplateError, *FOREIGN_ERRORS) as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return str(result[0][0])

    def pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[Piece]:
        """`render`'s text, cut so that what a client wrote of markup stands alone.

        Returns:
            Texts in order, which join to `render`'s; True = a control token or tag that a client
            wrote, to be encoded as plain text.
        Raises:
            InvalidRequest: as `render`; or the template takes a message apart at a token that the
                client wrote in it, so that it cannot be told whose the token is.
        """
        rendered = self.render(messages, tools=tools, options=options)
        every = _finder((*self.control_tokens, *self.tags))
        if every is None or not _holds((messages, tools, options), every):
            return [(rendered, False)]
        marks = _free_marks((messages, tools, options), self.source)
        # Some templates cut reasoning off an assistant's content at its tags, so that these are
        # markup after all if the client is believed to be the assistant; a second try leaves them.
        for spared in (every, _finder(self.control_tokens)):
            try:
                marked = self.render(
                    [_marked_message(message, every, spared, marks) for message in messages],
                    tools=_marked(tools, every, marks),
                    options=_marked(options, every, marks),
                )
            except InvalidRequest:
                continue  # it accepted the text as it is: the marks are what it refuses
            pieces = split_marked(marked, marks)
            if "".join(text for text, _ in pieces) == rendered:
                return pieces
        raise InvalidRequest(
            "messages: the chat template takes a message apart that holds markup of the model, "
            "such as a control token or a tag; leave the markup out of the text",
            param="messages",
        )


def _finder(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Matches any of the tokens, longer ones first; None if there are none."""
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _strings(value: Any) -> Iterator[str]:
    """Every string inside a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(value.keys()))
        yield from _strings(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _holds(value: Any, tokens: re.Pattern[str]) -> bool:
    return any(tokens.search(text) for text in _strings(value))


def _free_marks(value: Any, source: str) -> Marks:
    """Two private-use characters that neither the client nor the template uses."""
    used = set(source).union(*_strings(value))
    codes = range(FIRST_MARK, LAST_MARK + 1)
    free = islice((chr(code) for code in codes if chr(code) not in used), 2)
    try:
        return next(free), next(free)
    except StopIteration:
        raise InvalidRequest(
            "messages: every private-use character is taken", param="messages"
        ) from None


def _marked_message(
    message: Mapping[str, Any],
    tokens: re.Pattern[str],
    spared: re.Pattern[str] | None,
    marks: Marks,
) -> dict[str, Any]:
    """A message with its tokens marked; in an assistant's content only those of `spared`."""
    result: dict[str, Any] = _marked(message, tokens, marks)
    if message.get("role") == "assistant" and "content" in message:
        content = message["content"]
        result["content"] = content if spared is None else _marked(content, spared, marks)
    return result


def _marked(value: Any, tokens: re.Pattern[str], marks: Marks) -> Any:
    """A copy of `value` in which every string, key or value, has its tokens marked."""
    if isinstance(value, str):
        return tokens.sub(lambda match: f"{marks[0]}{match.group()}{marks[1]}", value)
    if isinstance(value, Mapping):
        return {_marked(k, tokens, marks): _marked(v, tokens, marks) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, tokens, marks) for item in value]
    return value


def split_marked(rendered: str, marks: Marks) -> list[Piece]:
    """Pieces of rendered text in order; True = what stands between two marks.

    A template may cut a marked string (`split`, slices); a mark without its partner is dropped, and
    still separates the text on its two sides.
    """
    opens, closes = marks
    pieces = []
    position = 0
    for match in re.finditer(f"{opens}([^{opens}{closes}]*){closes}", rendered):
        pieces.append((rendered[position : match.start()], False))
        pieces.append((match.group(1), True))
        position = match.end()
    pieces.append((rendered[position:], False))
    lone = re.compile(f"[{opens}{closes}]")
    return [(part, plain) for text, plain in pieces for part in lone.split(text) if part]


def load_chat_template(
    folder: Path,
    control_tokens: Sequence[str],
    tags: Sequence[str] = (),
    *,
    recipe: str = "",
    given: str | None = None,
) -> ChatTemplate | None:
    """The template of a deployment: the one given, else that of the checkpoint's folder
    (`chat_template.jinja`, then `tokenizer_config.json`), else the recipe's.

    Args:
        folder: checkpoint; its special tokens are the constants of any template.
        control_tokens: texts of its special tokens.
        tags: texts of its other added tokens.
        recipe: `package:file` of the template that the recipe brings for checkpoints without one.
        given: `ingress.chat_template`.
    Returns:
        None if there is none of the three.
    Raises:
        ConfigError: the one given cannot be read or compiled; names the line.
        CheckpointError: the checkpoint's cannot.
    """
    from jinja2 import Environment, TemplateSyntaxError, meta
    from jinja2.ext import loopcontrols

    config = _tokenizer_config(folder)
    name, source = f"the chat template of {folder}", None
    if given is not None:
        name, source = _given_source(given)
    else:
        source = _template_source(folder, config)
        if source is None and recipe:
            package, _, file = recipe.partition(":")
            source = resources.files(package).joinpath(file).read_text(encoding="utf-8")
    if source is None:
        return None
    try:
        tree = Environment(extensions=[loopcontrols, _generation_tag()]).parse(source)
        undeclared = meta.find_undeclared_variables(tree)
    except TemplateSyntaxError as error:
        kind = CheckpointError if given is None else ConfigError
        raise kind(f"{name} does not compile, line {error.lineno}: {error.message}") from error
    constants = {
        name: value if isinstance(value, str) else value["content"]
        for name, value in config.items()
        if name.endswith("_token") and (isinstance(value, str) or _is_token_record(value))
    }
    # Names a template only ever assigns (loops, set) are not undeclared; helpers are functions.
    helpers = {"raise_exception", "strftime_now", "namespace", "range", "dict", "cycler", "joiner"}
    variables = undeclared - helpers - RESERVED_VARIABLES - set(constants)
    return ChatTemplate(
        name=name,
        given=given is not None,
        source=source,
        constants=constants,
        control_tokens=tuple(control_tokens),
        tags=tuple(tags),
        variables=frozenset(variables),
    )


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    return config


def template_line(error: BaseException | None) -> int | None:
    """Line of a template at which an error arose; None = in no line of it."""
    from jinja2 import TemplateSyntaxError

    if error is None:
        return None
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == TEMPLATE_FILE]
    return lines[-1] if lines else None


def _given_source(given: str) -> tuple[str, str]:
    """What to call the template that a deployment brings, and its text."""
    setting = "the chat template (ingress.chat_template)"
    if is_inline_template(given):
        return setting, given
    try:
        return f"the chat template {given}", Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} cannot be read: {error}") from error


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
