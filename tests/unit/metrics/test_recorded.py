"""No series is declared that nothing records."""

from __future__ import annotations

import re
from pathlib import Path

from flare_ray.metrics import names

PACKAGE = Path(names.__file__).parent.parent


def test_every_declared_series_is_used_by_some_code():
    code = "\n".join(
        path.read_text("utf-8") for path in PACKAGE.rglob("*.py") if path != Path(names.__file__)
    )
    used = set(re.findall(r"\bnames\.([A-Z_0-9]+)\b", code))
    variables = {k for k, v in vars(names).items() if isinstance(v, names.Series)}
    assert len(variables) == len(names.declared())
    assert variables <= used, sorted(variables - used)
