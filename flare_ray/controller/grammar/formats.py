"""String formats as patterns: each matches only values that checkers of the format accept."""

from __future__ import annotations

from collections.abc import Mapping

_DAY = r"((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_DATE = rf"[12][0-9]{{3}}-{_DAY}"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
_ZONE = r"(Z|[+-](0[0-9]|1[0-4]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{1,3}}"
_HEX = "[0-9a-f]"

FORMATS: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "time": f"^{_CLOCK}{_ZONE}$",
    "date-time": f"^{_DATE}T{_CLOCK}{_ZONE}$",
    "uuid": f"^{_HEX}{{8}}-{_HEX}{{4}}-[1-5]{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}$",
    "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$",
    "hostname": f"^{_HOST}$",
    "email": rf"^[a-z0-9]+([._+-][a-z0-9]+){{0,4}}@{_HOST}$",
    "uri": rf"^https?://{_HOST}(/[A-Za-z0-9._~-]*){{0,8}}$",
}
"""Formats that are generated; others are refused by name."""
