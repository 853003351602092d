"""The scripted recipe's declaration: read this to know what the engine may ask of it."""

from __future__ import annotations

from flare_ray.contracts.manifest import SamplingDefaults
from flare_ray.recipes.declaration import ChatFormat, Recipe, Speculation

_HERE = "tests.support.scripted"

DOTTED = f"{_HERE}.recipe:RECIPE"
"""Value of EngineConfig.recipe that selects it."""

RECIPE = Recipe(
    name="scripted",
    architectures=("ScriptedForTests",),
    model_types=("scripted",),
    tensor_parallel=(1, 2, 4),
    speculation=Speculation(
        drafter="scripted", default_draft_tokens=5, max_draft_tokens=7, copy_inputs=True
    ),
    sampling_defaults=SamplingDefaults(temperature=1.0, top_p=0.95),
    chat=ChatFormat(),
    geometry=f"{_HERE}.geometry:geometry",
    manifest=f"{_HERE}.geometry:manifest",
    state=f"{_HERE}.state:state",
    target=f"{_HERE}.target:target",
    drafter=f"{_HERE}.drafter:drafter",
)
