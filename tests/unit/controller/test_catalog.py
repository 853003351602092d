"""Selection among prepared programs."""

import msgspec
import pytest

from flare_ray.config import EngineConfig, SpeculationConfig
from flare_ray.contracts.shapes import GraphKind
from flare_ray.controller.catalog import serve_selection
from flare_ray.errors import ConfigError
from tests.support.fake_channel import make_manifest


def config(concurrency=4, **speculation):
    return EngineConfig(
        checkpoint="scripted",
        concurrency=concurrency,
        context_tokens=1024,
        speculation=SpeculationConfig(**speculation),
    )


def without(manifest, unwanted):
    shapes = tuple(shape for shape in manifest.shapes if not unwanted(shape))
    return msgspec.structs.replace(manifest, shapes=shapes)


def test_default_concurrency_and_drafts_give_eighteen_rounds():
    assert len(serve_selection(make_manifest(), config()).rounds) == 18


def test_smallest_program_that_holds_the_cohort_is_a_candidate_for_each_width():
    catalog = serve_selection(make_manifest(slots=3), config(3))
    assert catalog.max_lanes == 4
    for lanes, batch in [(1, 1), (2, 2), (3, 4), (4, 4)]:
        candidates = catalog.candidates(lanes)
        assert [shape.verify_width for shape in candidates] == [1, 2, 3, 4, 5, 6]
        assert {shape.batch_capacity for shape in candidates} == {batch}


def test_width_beyond_the_token_capacity_is_no_candidate():
    manifest = without(make_manifest(), lambda s: s.batch_capacity == 4 and s.verify_width > 2)
    catalog = serve_selection(manifest, config())
    assert [shape.verify_width for shape in catalog.candidates(3)] == [1, 2]
    assert len(catalog.candidates(2)) == 6


def test_fewer_drafts_and_lanes_select_a_subset():
    catalog = serve_selection(make_manifest(), config(2, draft_tokens=2))
    assert (catalog.max_width, catalog.slots) == (3, 2)


def test_widths_select_among_the_prepared():
    catalog = serve_selection(make_manifest(), config(widths=(1, 4)))
    assert {shape.verify_width for shape in catalog.rounds} == {1, 4}


@pytest.mark.parametrize(
    ("speculation", "kind"),
    [
        ({"families": "ordinary"}, GraphKind.DECODE),
        ({"draft_tokens": 0}, GraphKind.DECODE),
        ({"families": "speculative", "draft_tokens": 0}, GraphKind.SPECULATIVE),
        ({}, GraphKind.SPECULATIVE),
    ],
)
def test_family_follows_the_settings(speculation, kind):
    catalog = serve_selection(make_manifest(), config(**speculation))
    assert {shape.kind for shape in catalog.rounds} == {kind}
    assert {shape.speculation for shape in catalog.prefill} == {kind is GraphKind.SPECULATIVE}


def test_no_drafts_without_an_ordinary_family_keep_absorbing():
    manifest = without(make_manifest(), lambda shape: not shape.speculation)
    catalog = serve_selection(manifest, config(draft_tokens=0))
    assert {(s.kind, s.verify_width) for s in catalog.rounds} == {(GraphKind.SPECULATIVE, 1)}


@pytest.mark.parametrize(
    ("unwanted", "speculation", "words"),
    [
        (lambda s: s.speculation, {"families": "speculative"}, "speculative family"),
        (lambda s: not s.speculation, {"families": "ordinary"}, "ordinary family"),
        (lambda s: s.kind is GraphKind.PREFILL, {}, "prefill"),
        (lambda s: s.batch_capacity == 4 and s.verify_width == 1, {}, "width one"),
    ],
)
def test_what_was_not_prepared_is_refused_by_name(unwanted, speculation, words):
    with pytest.raises(ConfigError, match=words):
        serve_selection(without(make_manifest(), unwanted), config(**speculation))
