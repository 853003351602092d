"""Which prepared programs this engine serves with, and which of them fit a cohort (contract: G1,
G2, G5, R6). Pure functions over shapes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flare_ray.config import EngineConfig
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.shapes import GraphKind, GraphShape
from flare_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServedCatalog:
    """The selected programs.

    Attributes:
        prefill: prefill programs, smallest batch capacity first.
        scored: prefill programs that score their prompt, likewise.
        resume: programs that go on from a whole restored prompt, likewise; () = none prepared.
        rounds: decode or speculative programs; sorted by batch capacity, then width.
        masked: their masked entries, in the same order; () = none prepared.
        slots: requests served together.
        max_width: largest width of `rounds`.
    """

    prefill: tuple[GraphShape, ...]
    scored: tuple[GraphShape, ...]
    resume: tuple[GraphShape, ...]
    rounds: tuple[GraphShape, ...]
    slots: int
    max_width: int
    masked: tuple[GraphShape, ...] = ()
    _candidates: dict[tuple[int, bool], tuple[GraphShape, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def max_lanes(self) -> int:
        """Lanes of the largest round."""
        return self.rounds[-1].batch_capacity

    def candidates(self, lanes: int, *, masked: bool = False) -> tuple[GraphShape, ...]:
        """For each width, and each packing of it, the smallest program that holds `lanes` (1 ..
        max_lanes): width one first, then by width and rows; the same tuple each time."""
        found = self._candidates.get((lanes, masked))
        if found is None:
            smallest: dict[tuple[int, int], GraphShape] = {}
            for shape in self.masked if masked else self.rounds:
                if shape.batch_capacity >= lanes:
                    key = (shape.verify_width, shape.rows // shape.batch_capacity)
                    smallest.setdefault(key, shape)
            found = tuple(smallest[key] for key in sorted(smallest))
            self._candidates[lanes, masked] = found
        return found


def serve_selection(manifest: PreparedManifest, config: EngineConfig) -> ServedCatalog:
    """Select the programs of one family that the settings allow.

    `draft_tokens: 0` serves the ordinary family where it was prepared, width-one speculative
    rounds where it was not (they still absorb).

    Raises:
        ConfigError: nothing prepared fits, or a setting asks for more than was prepared.
    """
    speculation = _serves_speculative(manifest, config)
    kind = GraphKind.SPECULATIVE if speculation else GraphKind.DECODE
    widths = _widths(manifest, config, kind)
    packed = _packed_rows(manifest, config)
    prepared = [
        shape
        for shape in manifest.shapes
        if shape.kind is kind
        and shape.verify_width in widths
        and (not shape.packed_capacity or shape.rows // shape.batch_capacity in packed)
    ]
    prepared.sort(key=lambda shape: (shape.batch_capacity, shape.verify_width, shape.rows))
    rounds = [shape for shape in prepared if not shape.masked]
    masked = tuple(
        shape
        for shape in prepared
        if shape.masked and (config.grammar.full_width or shape.verify_width == 1)
    )
    prefill = _prompts(manifest, GraphKind.PREFILL, speculation)
    scored = _prompts(manifest, GraphKind.SCORED_PREFILL, speculation)
    resume = _prompts(manifest, GraphKind.RESUME, speculation)
    if not prefill or not any(shape.verify_width == 1 for shape in rounds):
        family = "speculative" if speculation else "ordinary"
        raise ConfigError(
            f"speculation.families: the {family} family was not prepared (it needs a prefill "
            "program and rounds of width one); prepare it or select the other family"
        )
    narrow = max(shape.batch_capacity for shape in rounds if shape.verify_width == 1)
    if narrow < rounds[-1].batch_capacity:
        raise ConfigError(
            f"rounds of {rounds[-1].batch_capacity} lanes were prepared, at width one only through "
            f"{narrow}; prepare width one for every batch capacity"
        )
    slots = min(manifest.slots, config.concurrency)
    max_width = max(shape.verify_width for shape in rounds)
    return ServedCatalog(prefill, scored, resume, tuple(rounds), slots, max_width, masked)


def narrowed(catalog: ServedCatalog, max_width: int) -> ServedCatalog:
    """The catalog without rounds wider than `max_width`, which is one at least."""
    rounds = tuple(shape for shape in catalog.rounds if shape.verify_width <= max_width)
    masked = tuple(shape for shape in catalog.masked if shape.verify_width <= max_width)
    widest = max(shape.verify_width for shape in rounds)
    return replace(catalog, rounds=rounds, masked=masked, max_width=widest)


def _prompts(
    manifest: PreparedManifest, kind: GraphKind, speculation: bool
) -> tuple[GraphShape, ...]:
    """Programs of a kind and family, smallest batch capacity first."""
    shapes = (s for s in manifest.shapes if s.kind is kind and s.speculation is speculation)
    return tuple(sorted(shapes, key=lambda shape: shape.batch_capacity))


def _serves_speculative(manifest: PreparedManifest, config: EngineConfig) -> bool:
    families = config.speculation.families
    if families != "both":
        return families == "speculative"
    if config.speculation.draft_tokens == 0:
        has_ordinary = any(shape.kind is GraphKind.DECODE for shape in manifest.shapes)
        return manifest.speculation and not has_ordinary
    return manifest.speculation


def _packed_rows(manifest: PreparedManifest, config: EngineConfig) -> set[int]:
    """Rows a lane of the packed rounds to serve with."""
    wanted = set(config.speculation.packed_rows)
    prepared = {s.rows // s.batch_capacity for s in manifest.shapes if s.packed_capacity}
    if not wanted <= prepared:
        raise ConfigError(
            f"speculation.packed_rows: {sorted(wanted - prepared)} were not prepared; prepared are "
            f"{sorted(prepared)}"
        )
    return wanted


def _widths(manifest: PreparedManifest, config: EngineConfig, kind: GraphKind) -> set[int]:
    prepared = {shape.verify_width for shape in manifest.shapes if shape.kind is kind}
    settings = config.speculation
    wanted = prepared
    if settings.widths is not None and kind is GraphKind.SPECULATIVE:
        wanted = set(settings.widths)
        if not wanted <= prepared:
            raise ConfigError(
                f"speculation.widths: {sorted(wanted - prepared)} were not prepared; prepared are "
                f"{sorted(prepared)}"
            )
    if settings.draft_tokens is not None:
        if kind is GraphKind.SPECULATIVE and settings.draft_tokens > manifest.draft_tokens:
            raise ConfigError(
                f"speculation.draft_tokens: {settings.draft_tokens} drafts were asked for, at most "
                f"{manifest.draft_tokens} were prepared"
            )
        wanted = {width for width in wanted if width <= settings.draft_tokens + 1}
    if settings.fixed_width is not None and settings.fixed_width not in wanted:
        raise ConfigError(
            f"speculation.fixed_width: width {settings.fixed_width} is not among those served, "
            f"{sorted(wanted)}"
        )
    return wanted
