"""Where an output ends, decided from the whole of it: quadratic, obvious, no streaming."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stops:
    """What may end an output."""

    max_tokens: int
    eos: Sequence[int] = ()
    strings: Sequence[bytes] = ()
    ids: Sequence[int] = ()
    sequences: Sequence[Sequence[int]] = ()
    min_tokens: int = 0
    include: bool = False


def one_shot(tokens: Sequence[int], table: Sequence[bytes], stops: Stops):
    """Visible bytes, reason, stop_reason, completion tokens; reason None = not ended yet."""
    text, starts = b"", []
    for count, token in enumerate(tokens, start=1):
        if token in stops.eos:
            return text, "stop", None, count
        if token in stops.ids:
            return text, "stop", token, count
        before = len(text)
        starts.append(before)
        text += table[token]
        for end in range(before + 1, len(text) + 1):
            ending = [stop for stop in stops.strings if text[:end].endswith(stop)]
            if ending and count > stops.min_tokens:
                stop = max(ending, key=len)
                cut = end if stops.include else end - len(stop)
                return text[:cut], "stop", stop.decode(errors="replace"), count
        done = [s for s in stops.sequences if tuple(tokens[:count][-len(s) :]) == tuple(s)]
        if done and count > stops.min_tokens:
            stop = max(done, key=len)
            cut = len(text) if stops.include else starts[count - len(stop)]
            return text[:cut], "stop", tuple(stop), count
        if count == stops.max_tokens:
            return text, "length", None, count
    return text, None, None, len(tokens)
