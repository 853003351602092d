"""Parts of the recipe that decide what the weights learn, and how answers are judged."""

import random

import pytest
import torch

from benchmarks.demo_training.assemble import assemble
from benchmarks.demo_training.card import upstream_licence
from benchmarks.demo_training.glm_family import GLM
from benchmarks.demo_training.measure import judge
from benchmarks.demo_training.network import DemoModel, from_published, to_published
from benchmarks.demo_training.phases import token_weights
from benchmarks.demo_training.prose import page_text
from benchmarks.demo_training.shape import MARKERS, text_config
from benchmarks.demo_training.storage import StoredView, round_in_place, stored_format
from benchmarks.demo_training.train import export
from flare_ray.config import EngineConfig
from flare_ray.device.prepare import make_plan
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.manifest import open_validated
from flare_ray.device.weights.quantiser import dequantise_tensors, quantise_tensors
from flare_ray.recipes.declaration import resolve
from flare_ray.workload.generators.edits import scrambled

FUNCTION = (
    "def scale(values, factor):\n    result = []\n    result.append(factor)\n    return result"
)
HTML = (
    "<head><script>x = 1</script></head><body><div>Home</div><p>Next</p><h1>Title</h1>"
    f"<p>{'A first paragraph of the page. ' * 5}</p><pre>a\n  b</pre></body>"
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(4)
    torch.set_num_threads(1)
    return DemoModel(text_config())


def test_weights_are_full_in_answers_and_raw_text_alone():
    sop, user, assistant, text = *(MARKERS.index(f"<{n}>") for n in ("sop", "|user|")), 8, 60
    ids = torch.tensor([[2, sop, user, text, text, assistant, text, text, user, 2, sop, text]])
    weights = token_weights(ids, GLM.ids, 0.25)[0].tolist()
    assert weights == [0.25, 1, 0.25, 0.25, 0.25, 1, 1, 1, 0.25, 0.25, 1, 1]


def test_rounding_the_model_gives_what_the_checkpoint_reads_back(model):
    published = to_published(model)
    other = from_published(DemoModel(text_config()), published)
    round_in_place(other, [name for name, _ in other.named_parameters()])
    back = dequantise_tensors(quantise_tensors(published, stored_format), torch.bfloat16)
    for name, value in to_published(other).items():
        assert torch.equal(value.float(), back[name].float()), name


def test_weights_return_after_a_rounded_step(model):
    names = [name for name, _ in model.named_parameters()]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with StoredView(model, names).seen():
        assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("name", "rows", "form"),
    [
        ("model.language_model.layers.4.mlp.experts.3.up_proj.weight", 128, "nvfp4"),
        ("model.language_model.layers.4.mlp.shared_experts.up_proj.weight", 128, "fp8_block"),
        ("model.language_model.layers.4.mlp.gate.weight", 8, "plain"),
        ("model.language_model.layers.0.self_attn.q_proj.weight", 512, "fp8_block"),
        ("model.language_model.embed_tokens.weight", 512, "plain"),
        ("lm_head.weight", 512, "plain"),
    ],
)
def test_stored_format_of(name, rows, form):
    assert WeightFormat(stored_format(name, torch.zeros(rows, 128))).kind == form


def test_scrambled_function_keeps_its_shape_and_changes_names_everywhere():
    for seed in range(20):
        source = scrambled(random.Random(seed), FUNCTION)
        assert source.count("\n") == FUNCTION.count("\n") and source != FUNCTION
        assert source.count("return") == 1 and "factor" in source


def test_page_begins_with_the_title_of_its_first_paragraph():
    text = page_text(HTML)
    assert text.startswith("Title\n") and "Home" not in text and "x = 1" not in text
    assert text.endswith("a\n  b")


def test_packaging_licences_of_a_distribution_are_left_out():
    text = "Files: *\nLicense: MIT\n\nFiles: debian/*\nLicense: GPL-2+\n\nLicense: MIT\n Permission"
    assert "GPL" not in upstream_licence(text) and "Permission" in upstream_licence(text)


def test_edits_are_judged_by_length():
    def item(lines):
        content = "```python\n" + "x\n" * lines + "```"
        return {"category": "edit", "expected": {"role": "assistant", "content": content}}

    short, long = item(12), item(13)
    assert judge(short, "</think>" + short["expected"]["content"])["exact_short"]
    assert judge(long, "</think>no") == {"exact": False, "exact_long": False}


def test_assembled_folder_is_what_the_recipe_lists(model, tmp_path):
    run, pack, folder = (tmp_path / name for name in ("run", "pack", "checkpoint"))
    run.mkdir()
    pack.mkdir()
    (pack / "tokenizer.json").write_text("{}")
    export(model, run, GLM)
    assemble(run, pack, folder, GLM)
    config = EngineConfig(checkpoint=str(folder), device="cpu", dtype="float32", context_tokens=256)
    plan = make_plan(config)
    _, validated = open_validated(folder, resolve(plan.recipe.manifest)(plan.geometry))
    formats = validated.formats()
    assert formats[WeightFormat.NVFP4_MODELOPT] == 3 * 8 * 3
    assert formats[WeightFormat.FP8_BLOCK] > 70
