"""Declaration of the recipe: names, limits and builders; importable without torch (contract: R1,
R4)."""

from __future__ import annotations

from flare_ray.contracts.manifest import SamplingDefaults
from flare_ray.recipes.declaration import ChatFormat, Recipe, Speculation

_PACKAGE = "flare_ray.recipes.qwen4_exp"

RECIPE = Recipe(
    name="qwen3.8-flash",
    architectures=("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"),
    model_types=("qwen4_exp", "qwen4_exp_text"),
    tensor_parallel=(1, 2, 4),
    speculation=Speculation(
        drafter="mtp",
        default_draft_tokens=5,
        max_draft_tokens=7,
        copy_inputs=True,
    ),
    sampling_defaults=SamplingDefaults(temperature=1.0, top_p=0.95, top_k=20),
    chat=ChatFormat(
        reasoning_open="<think>",
        reasoning_close="</think>",
        prompt_opens_reasoning=True,
        tool_open="<tool_call>",
        tool_close="</tool_call>",
        tool_style="xml_parameters",
        reasoning_efforts=("low", "medium", "xhigh"),
    ),
    geometry=f"{_PACKAGE}.geometry:read_geometry",
    manifest=f"{_PACKAGE}.weights:manifest",
    state=f"{_PACKAGE}.state:state_spec",
    target=f"{_PACKAGE}.target:build_target",
    drafter=f"{_PACKAGE}.drafter:build_drafter",
    tolerated_prefixes=("model.visual.",),
    notes={
        "hash_reset": "n-gram hashing starts anew after the first eos_token_id of config.json, "
        "whatever else ends a text.",
        "draft_selection": "Each draft step selects afresh.",
    },
)
