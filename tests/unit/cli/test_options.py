"""Engine options: what each changes, what they exclude, and what messages call them."""

import pytest
import typer
from pydantic import BaseModel

from flare_ray.cli.options import (
    SETTINGS,
    EngineOptions,
    draft_counts,
    engine_config,
    flag_of,
    merge,
    option_names,
    parse_widths,
)
from flare_ray.config import EngineConfig
from flare_ray.errors import ConfigError
from flare_ray.recipes import registry

# Chosen by several options together, or given as the argument.
NOT_IN_TABLE = {"checkpoint", "speculation.families", "speculation.policy"}


def leaves(model: type[BaseModel], prefix: str = "") -> set[str]:
    """Dotted names of every setting."""
    found: set[str] = set()
    for name, field in model.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            found |= leaves(nested, f"{prefix}{name}.")
        else:
            found.add(prefix + name)
    return found


def configured(section: dict | None = None, **options) -> EngineConfig:
    """The settings that options make of a file's section."""
    section = {"checkpoint": "c", **(section or {})}
    chosen = EngineOptions(**options)
    return engine_config(section, chosen.overrides(section))


def test_every_setting_of_an_engine_has_an_option():
    assert leaves(EngineConfig) - NOT_IN_TABLE == set(SETTINGS.values())


def test_every_row_of_the_table_is_an_option():
    assert set(SETTINGS) <= set(option_names())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("recipe", "r"),
        ("tensor_parallel_size", 2),
        ("device", "cuda"),
        ("dtype", "float32"),
        ("threads", 3),
        ("kv_dtype", "bfloat16"),
        ("quantised_activations", "never"),
        ("expert_weights", "packed"),
        ("tables", "host"),
        ("eager", True),
        ("core", "kept"),
        ("debug_checks", True),
        ("queue_depth", 2),
        ("rank_timeout", 5.0),
        ("concurrency", 7),
        ("context_tokens", 128),
        ("page_pool_tokens", 8192),
        ("prefill_tokens", 64),
        ("prefix_cache", False),
        ("prefix_cache_bytes", 4096),
        ("prefix_cache_host_bytes", 1 << 20),
        ("reproducible", "always"),
        ("logprobs", "processed"),
        ("grammar", False),
        ("grammar_preload", True),
        ("grammar_full_width", False),
        ("grammar_own_rounds", True),
        ("grammar_compile_timeout", 2.5),
        ("grammar_compile_memory", 1 << 27),
        ("grammar_max_source", 4096),
        ("grammar_cache_bytes", 1 << 22),
        ("mtp_draft_tokens", 3),
        ("widths", (1, 2, 4)),
        ("token_capacity", 64),
        ("fixed_width", 2),
        ("history_drafts", True),
        ("request_drafts", True),
        ("max_waiting", 9),
        ("max_waiting_tokens", 4096),
        ("retry_after", 0.5),
        ("max_retry_after", 30.0),
        ("max_prompt_tokens", 100),
        ("preemption", False),
    ],
)
def test_option_replaces_its_setting(option, value):
    config: object = configured(**{option: value})
    for part in SETTINGS[option].split("."):
        config = getattr(config, part)
    assert config == value


def test_disk_tier_is_chosen_by_its_path_and_bytes():
    cache = configured(
        prefix_cache_host_bytes=1 << 20, prefix_cache_disk_path="p", prefix_cache_disk_bytes=1 << 22
    ).prefix_cache
    assert (cache.disk_path, cache.disk_bytes) == ("p", 1 << 22)
    with pytest.raises(ConfigError, match="host_bytes"):
        configured(prefix_cache_disk_path="p")


def test_option_left_out_keeps_the_file():
    section = {"concurrency": 2, "speculation": {"draft_tokens": 3}, "dtype": "float32"}
    assert configured(section) == EngineConfig(checkpoint="c", **section)


@pytest.mark.parametrize(
    ("options", "families"),
    [
        ({}, "both"),
        ({"no_mtp": True}, "ordinary"),
        ({"mtp_only": True}, "speculative"),
        ({"mtp_draft_tokens": 0}, "ordinary"),
        ({"mtp_draft_tokens": 0, "mtp_only": True}, "speculative"),
        ({"mtp_draft_tokens": 2}, "both"),
    ],
)
def test_families_follow_the_mtp_options(options, families):
    assert configured(**options).speculation.families == families


def test_no_drafts_keep_absorbing_where_only_the_speculative_family_is_prepared():
    speculation = configured(
        {"speculation": {"families": "speculative"}}, mtp_draft_tokens=0
    ).speculation
    assert (speculation.families, speculation.draft_tokens) == ("speculative", 0)


@pytest.mark.parametrize("options", [{"no_mtp": True}, {"mtp_draft_tokens": 0}])
def test_ordinary_family_takes_back_what_only_drafts_could_fulfil(options):
    section = {"policy": "fixed", "fixed_width": 4, "history_drafts": True, "learned_drafts": False}
    speculation = configured({"speculation": section}, **options).speculation
    assert speculation.fixed_width is None and speculation.learned_drafts
    assert speculation.copies == ()


def test_learned_drafts_are_turned_off_where_copies_are_left():
    speculation = configured(request_drafts=True, learned_drafts=False).speculation
    assert speculation.copies == ("request_drafts",) and not speculation.learned_drafts
    with pytest.raises(ConfigError, match="learned_drafts: false leaves"):
        configured(learned_drafts=False)
    packed = {"speculation": {"packed_rows": [2]}}
    with pytest.raises(ConfigError, match="packed_rows are assigned"):
        configured(packed, request_drafts=True, learned_drafts=False)


@pytest.mark.parametrize(
    ("options", "policy", "width"),
    [
        ({"mtp_adaptive_verification": True}, "adaptive", None),
        ({"mtp_adaptive_verification": False}, "fixed", None),
        ({"fixed_width": 4}, "fixed", 4),
        ({"fixed_width": 4, "mtp_adaptive_verification": False}, "fixed", 4),
    ],
)
def test_policy_follows_the_verification_options(options, policy, width):
    speculation = configured(**options).speculation
    assert (speculation.policy, speculation.fixed_width) == (policy, width)


def test_adaptive_verification_drops_the_width_that_the_file_fixed():
    section = {"speculation": {"policy": "fixed", "fixed_width": 4}}
    speculation = configured(section, mtp_adaptive_verification=True).speculation
    assert (speculation.policy, speculation.fixed_width) == ("adaptive", None)


def test_fewer_drafts_select_a_subset_of_the_widths():
    section = {"speculation": {"widths": [1, 2, 4, 8], "draft_tokens": 7}}
    assert configured(section, mtp_draft_tokens=3).speculation.widths == (1, 2, 4)


def test_widths_decide_the_draft_count_of_the_file():
    section = {"speculation": {"draft_tokens": 7}}
    assert configured(section, widths=(1, 2, 4)).speculation.draft_tokens == 3


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        ({}, {"no_mtp": True, "mtp_only": True}, "exclude each other"),
        ({}, {"no_mtp": True, "mtp_draft_tokens": 3}, "--mtp-draft-tokens needs them"),
        ({}, {"no_mtp": True, "fixed_width": 2}, "--fixed-width needs them"),
        ({}, {"no_mtp": True, "widths": (1, 2)}, "--widths needs them"),
        ({}, {"no_mtp": True, "history_drafts": True}, "--history-drafts needs them"),
        ({}, {"mtp_draft_tokens": 0, "fixed_width": 3}, "--mtp-draft-tokens 0 serves without"),
        ({}, {"mtp_adaptive_verification": True, "fixed_width": 3}, "exclude each other"),
        ({}, {"mtp_draft_tokens": 2, "fixed_width": 5}, "reach width 3, below .* 5"),
        ({}, {"mtp_draft_tokens": 2, "widths": (1, 2)}, "largest width must be"),
        ({"widths": [1, 2, 8]}, {"mtp_draft_tokens": 3}, "needs width 4"),
        ({"fixed_width": 6, "policy": "fixed"}, {"mtp_draft_tokens": 3}, "reach width 4"),
    ],
)
def test_contradiction_is_refused_and_names_the_option(section, options, message):
    with pytest.raises(ConfigError, match=message):
        configured({"speculation": section}, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "^--concurrency: .* got 0$"),
        ({"device": "tpu"}, "^--device: .*'cpu' or 'cuda'.*'tpu'"),
        ({"tensor_parallel_size": 3}, "^--tensor-parallel-size: "),
        ({"mtp_draft_tokens": 8}, "^--mtp-draft-tokens: .*7, got 8"),
        ({"queue_depth": 3}, "^--queue-depth: "),
        ({"retry_after": 0.0}, "^--retry-after: "),
    ],
)
def test_wrong_value_is_named_by_the_option_that_gave_it(options, message):
    with pytest.raises(ConfigError, match=message):
        configured(**options)


def test_wrong_value_of_the_file_is_named_by_its_path():
    with pytest.raises(ConfigError, match=r"^engine\.speculation\.draft_tokens: "):
        configured({"speculation": {"draft_tokens": 9}}, concurrency=2)


def test_unknown_setting_is_named():
    with pytest.raises(ConfigError, match=r"^concurency: no such setting"):
        engine_config({"checkpoint": "c", "concurency": 2}, {}, prefix="")


def test_every_wrong_value_has_a_line():
    with pytest.raises(ConfigError) as caught:
        configured(concurrency=0, queue_depth=3)
    assert len(str(caught.value).splitlines()) == 2


def test_cpu_without_a_dtype_is_float32():
    assert configured(device="cpu").dtype == "float32"
    assert configured({"dtype": "bfloat16"}, device="cpu").dtype == "bfloat16"
    assert configured(device="cpu", dtype="bfloat16").dtype == "bfloat16"


def test_merge_reports_what_changed_and_keeps_its_argument():
    section = {"concurrency": 4, "speculation": {"draft_tokens": 5}}
    overrides = {
        "concurrency": 4,
        "speculation.draft_tokens": 3,
        "queue_depth": 2,
        "admission.max_prompt_tokens": 7,
    }
    merged, lines = merge(section, overrides)
    assert lines == [
        "engine.speculation.draft_tokens: 5 -> 3",
        "engine.queue_depth: 1 (default) -> 2",
        "engine.admission.max_prompt_tokens: not set -> 7",
    ]
    assert merged["speculation"] == {"draft_tokens": 3}
    assert section == {"concurrency": 4, "speculation": {"draft_tokens": 5}}


def test_draft_counts_name_every_recipe_with_default_and_maximum():
    text = draft_counts()
    for recipe in registry.recipes():
        counts = recipe.speculation
        assert f"{recipe.name}: {counts.default_draft_tokens} by default" in text
        assert f"at most {counts.max_draft_tokens}" in text


def test_widths_are_read_from_commas():
    assert parse_widths("1,2,4") == (1, 2, 4)
    with pytest.raises(typer.BadParameter, match="such as 1,2,4, got '1;2'"):
        parse_widths("1;2")


def test_flag_of_a_setting_is_the_option_that_replaces_it():
    assert flag_of("threads_per_rank") == "--threads"
    assert flag_of("speculation.policy") == "--mtp-adaptive-verification"
