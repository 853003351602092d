"""What an output must match, as the engine compiles it (contract: K1).

One record holds the whole language of an answer: reasoning first, where the family has it, then
calls or the answer itself. It is self-contained and canonical: equal records are compiled once.
"""

from __future__ import annotations

from typing import Literal

import msgspec

AnswerKind = Literal["text", "none", "json_schema", "regex", "ebnf"]
"""What an answer may be: any text; nothing (calls only); or what the source describes."""


class CallSyntax(msgspec.Struct, frozen=True, array_like=True):
    """How a family writes a tool call; fields as in `recipes.declaration.ChatFormat`."""

    tool_open: str
    tool_close: str
    style: Literal["arg_pairs", "json", "xml_parameters", "attributes"]
    arg_key_open: str = ""
    arg_key_close: str = ""
    arg_value_open: str = ""
    arg_value_close: str = ""
    block_open: str = ""
    block_close: str = ""

    @property
    def opening(self) -> str:
        """The tag that begins a call, or a run of calls where the family has tags around it."""
        return self.block_open or self.tool_open


class ToolGrammar(msgspec.Struct, frozen=True, array_like=True):
    """One function that may be called.

    Attributes:
        schema: JSON schema of its arguments, an object; "" = any arguments.
    """

    name: str
    schema: str = ""


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The language of one output.

    Attributes:
        kind: what the answer is.
        source: JSON schema as JSON text, regular expression, or EBNF with a rule `root`.
        tools: functions that may be called; () = no call is possible.
        calls: "optional" = calls or the answer ("text": text with calls in it); "required" = at
            least one call and nothing else.
        parallel: more than one call is allowed.
        syntax: how a call is written; needed where there are tools.
        reasoning: "none" = the answer begins at once; "open" = the prompt has opened reasoning,
            which must be closed first; "optional" = it may be opened as the first thing.
        reasoning_open / reasoning_close: its tags.
    """

    kind: AnswerKind
    source: str = ""
    tools: tuple[ToolGrammar, ...] = ()
    calls: Literal["optional", "required"] = "optional"
    parallel: bool = True
    syntax: CallSyntax | None = None
    reasoning: Literal["none", "open", "optional"] = "none"
    reasoning_open: str = ""
    reasoning_close: str = ""
