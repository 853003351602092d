"""A checkpoint folder without weights: a byte-level tokeniser and a chat template with every
feature the frontend reads. One byte is one token, so that tests can count and split at will."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from flare_ray.recipes.declaration import ChatFormat

CHAT = ChatFormat(
    reasoning_open="<think>",
    reasoning_close="</think>",
    prompt_opens_reasoning=True,
    tool_open="<tool_call>",
    tool_close="</tool_call>",
    tool_style="arg_pairs",
    arg_key_open="<arg_key>",
    arg_key_close="</arg_key>",
    arg_value_open="<arg_value>",
    arg_value_close="</arg_value>",
    reasoning_efforts=("low", "high", "max"),
)
CONTROL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
TEMPLATE = """\
{%- set effort = reasoning_effort if reasoning_effort is defined else 'max' -%}
{{- '<|system|>effort ' ~ effort -}}
{%- if tools -%}
    {{- '<|system|>tools ' -}}
    {%- for tool in tools -%}{{- tool | tojson -}}{%- endfor -%}
{%- endif -%}
{%- for m in messages -%}
    {%- if m.role == 'tool' -%}
        {{- '<|observation|>' ~ m.content -}}
    {%- elif m.role == 'assistant' -%}
        {{- '<|assistant|><think>' ~ (m.reasoning_content or '') ~ '</think>' ~ m.content -}}
        {%- for c in m.tool_calls or [] -%}
            {{- '<tool_call>' ~ c.function.name -}}
            {%- for k, v in c.function.arguments.items() -%}
                {{- '<arg_key>' ~ k ~ '</arg_key><arg_value>' -}}
                {{- (v if v is string else v | tojson) ~ '</arg_value>' -}}
            {%- endfor -%}
            {{- '</tool_call>' -}}
        {%- endfor -%}
    {%- else -%}
        {%- if m.content == 'refuse me' -%}{{- raise_exception('no such words') -}}{%- endif -%}
        {{- '<|' ~ m.role ~ '|>' ~ m.content -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|><think>' -}}{%- endif -%}
{%- if clear_thinking is defined and clear_thinking -%}{{- '' -}}{%- endif -%}
"""


def write_chat_checkpoint(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
