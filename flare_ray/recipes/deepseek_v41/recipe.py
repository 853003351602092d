"""Declaration of the recipe: names, limits and builders; importable without torch (contract: R1,
R3)."""

from __future__ import annotations

from flare_ray.contracts.manifest import SamplingDefaults
from flare_ray.recipes.declaration import ChatFormat, Recipe, Speculation

_PACKAGE = "flare_ray.recipes.deepseek_v41"

RECIPE = Recipe(
    name="deepseek-v4.1-flash",
    architectures=("DeepseekV41ForCausalLM",),
    model_types=("deepseek_v41", "deepseek_v41_text"),
    tensor_parallel=(1, 2, 4),
    speculation=Speculation(
        drafter="dspark",
        default_draft_tokens=7,
        max_draft_tokens=7,
        copy_inputs=True,
        block=True,
        forecasts=True,
    ),
    sampling_defaults=SamplingDefaults(temperature=1.0, top_p=1.0),
    chat=ChatFormat(
        reasoning_open="<think>",
        reasoning_close="</think>",
        prompt_opens_reasoning=True,
        tool_block_open="<｜DSML｜ calls>",
        tool_block_close="</｜DSML｜ calls>",
        tool_open="<｜DSML｜ invoke",
        tool_close="</｜DSML｜ invoke>",
        tool_style="attributes",
        arg_key_open="<｜DSML｜ parameter",
        arg_value_close="</｜DSML｜ parameter>",
        reasoning_efforts=("low", "high", "max"),
        template=f"{_PACKAGE}:chat_template.jinja",
    ),
    geometry=f"{_PACKAGE}.geometry:read_geometry",
    manifest=f"{_PACKAGE}.weights:manifest",
    state=f"{_PACKAGE}.state:state_spec",
    target=f"{_PACKAGE}.target:build_target",
    drafter=f"{_PACKAGE}.drafter:build_drafter",
    tolerated_prefixes=("vision.", "aligner.", "image_"),
    notes={
        "block": "The block is as long as the program drafts (7 by default; trained with 5): its "
        "length is independent of the verified width.",
    },
)
