"""docs/sampling-matrix.md: `python -m tests.support.matrix.page` writes it anew.

The page states what tests/matrix checks: its numbers come from the same axes and constants, and a
test compares it with what is committed.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter

from tests.rules.sources import ROOT
from tests.support.matrix.cells import (
    AXES,
    DRAFTERS,
    MAX_TOKENS,
    REGEX,
    SCHEMA,
    every_cell,
    refusal,
)
from tests.support.matrix.judge import ALPHA, BINS, MIN_LAW_TOKENS, MIN_MODE_TOKENS, detectable

PAGE = ROOT / "docs" / "sampling-matrix.md"
MAX_REFUSED_RATIO = 0.05

_TEXT = """# Which sampling features work together

Written by `python -m tests.support.matrix.page`; `tests/matrix/` runs the cells and fails when this
page is stale.

Every combination of the values below is a **cell**: an HTTP request to a whole engine in one
process, over a vocabulary of {vocabulary} tokens and a random target of second order.
**{cells:,} cells, {exact:,} exact, {refused:,} refused** ({ratio:.1%}).

| Axis | Values |
| --- | --- |
{axes}

"penalties: all" is repetition, presence and frequency penalty, `min_tokens` and bad words together.
"grammar: regex" is `{regex}` in
`guided_regex`; "JSON schema" is `{schema}` in `response_format`.
"seed: given" runs in the reproducible mode, "none" and "given, plain" in the plain one. "drafter:
off" is width-one execution.

What each cell must show:

- **Greedy**: text, finish reason, stop reason, usage and log-probabilities are those of a plain
  loop over the target's table and a brute-force search for stops; so they equal width-one
  execution token for token.
- **Grammar**: a token has a probability if another regular expression engine finds a way from the
  text through it to a whole output. Where `min_tokens` forbids the only end there is, the output
  ends all the same, without a terminal token.
- **Sampled, reproducible**: the same answer as width-one execution, token for token.
- **Sampled**: given its own history every token becomes a uniform number under the exact law. The
  numbers of all cells of one drafter, seed mode, grammar, penalties, min-p and bias go into one χ²
  test over {bins} bins at level {alpha:g}, those of a drafter and seed mode into another; seeds
  are fixed.
  With the {law:,} and {mode:,} tokens they hold at least, a total variation of {law_tv:.2f} and
  {mode_tv:.2f} from the exact law is found with a probability of 0.99.
- **Streams** have one finish per choice and join to the whole answer; JSON is finite.

## Pairs

Values of both axes and cells per pair of values, all of them exact{pairs_note}.

{pairs}

## Refused

{refusals}
"""


def render() -> str:
    """The page's text."""
    cells = every_cell()
    refused = [cell for cell in cells if refusal(cell)]
    names = {"drafter": tuple(DRAFTERS), **{name: tuple(values) for name, values in AXES.items()}}
    names["temperature"] = ("0", "0.9")
    reasons = Counter(refusal(cell) for cell in refused)
    listed = [f"- {reason} ({count:,} cells)" for reason, count in sorted(reasons.items())]
    return _TEXT.format(
        vocabulary=len(_vocabulary()),
        cells=len(cells),
        exact=len(cells) - len(refused),
        refused=len(refused),
        ratio=len(refused) / len(cells),
        axes="\n".join(f"| {name} | {' · '.join(values)} |" for name, values in names.items()),
        bins=BINS,
        alpha=ALPHA,
        regex=REGEX,
        schema=json.dumps(SCHEMA),
        law=MIN_LAW_TOKENS,
        mode=MIN_MODE_TOKENS,
        law_tv=detectable(MIN_LAW_TOKENS),
        mode_tv=detectable(MIN_MODE_TOKENS),
        pairs_note=" but the refused ones" if refused else "",
        pairs=_pair_table(names, len(cells)),
        refusals="\n".join(listed) or f"Nothing. Budget per cell: {MAX_TOKENS} tokens.",
    )


def _vocabulary() -> tuple[str, ...]:
    from tests.support.matrix.model import TOKENS

    return TOKENS


def _pair_table(names: dict[str, tuple[str, ...]], cells: int) -> str:
    """Cells of each pair of values: the product holds all of them equally often."""
    axes = list(names)
    lines = ["| | " + " | ".join(axes[1:]) + " |", "| --- |" + " ---: |" * (len(axes) - 1)]
    for row, first in enumerate(axes[:-1]):
        entries = [""] * row
        for second in axes[row + 1 :]:
            kinds = len(list(itertools.product(names[first], names[second])))
            entries.append(f"{kinds} × {cells // kinds:,}")
        lines.append(f"| {first} | " + " | ".join(entries) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
