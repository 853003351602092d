"""Declaration of the recipe: names, limits and builders; importable without torch (contract: R1,
R2)."""

from __future__ import annotations

from flare_ray.contracts.manifest import SamplingDefaults
from flare_ray.recipes.declaration import ChatFormat, Recipe, Speculation

_PACKAGE = "flare_ray.recipes.glm5_next"

RECIPE = Recipe(
    name="glm-5.3-flash",
    architectures=("Glm5NextForConditionalGeneration",),
    model_types=("glm5_next", "glm5_next_text"),
    tensor_parallel=(1, 2, 4),
    speculation=Speculation(
        drafter="mtp",
        default_draft_tokens=5,
        max_draft_tokens=7,
        copy_inputs=True,
    ),
    sampling_defaults=SamplingDefaults(temperature=1.0, top_p=0.95),
    chat=ChatFormat(
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
    ),
    geometry=f"{_PACKAGE}.geometry:read_geometry",
    manifest=f"{_PACKAGE}.weights:manifest",
    state=f"{_PACKAGE}.state:state_spec",
    target=f"{_PACKAGE}.target:build_target",
    drafter=f"{_PACKAGE}.drafter:build_drafter",
    tolerated_prefixes=("model.visual.",),
    notes={
        "position_zero": "The drafter's embedding at position 0 is zero.",
        "draft_selection": "Each draft step selects afresh; index_share_for_mtp_iteration is not "
        "used.",
    },
)
