"""The same comparison with another author's implementation and its checkpoint, where they lie
beside the repository."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.recipes.deepseek_v41.test_target import LOGITS_ATOL
from tests.recipes.parity.test_target import largest_error
from tests.support.recipe_driver import RecipeDriver

FOLDER = Path(__file__).resolve().parents[3].parent / "shared" / "oracles" / "deepseek"
LENGTHS = (5, 16, 17, 37, 96, 131)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def settings(cfg, rows: list[int]) -> dict:
    """config.json of the other author's settings record."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "eos_token_id": 1,
        "text_config": {
            "vocab_size": cfg.vocab_size,
            "hidden_size": cfg.dim,
            "moe_intermediate_size": cfg.inter,
            "num_hidden_layers": cfg.n_layers,
            "num_nextn_predict_layers": cfg.n_mtp,
            "num_attention_heads": cfg.heads,
            "head_dim": cfg.head_dim,
            "qk_rope_head_dim": cfg.rope_dim,
            "q_lora_rank": cfg.q_lora,
            "o_groups": cfg.o_groups,
            "o_lora_rank": cfg.o_lora,
            "sliding_window": cfg.window,
            "n_routed_experts": cfg.experts,
            "num_experts_per_tok": cfg.topk_experts,
            "routed_scaling_factor": cfg.route_scale,
            "swiglu_limit": cfg.limit,
            "rms_norm_eps": cfg.eps,
            "compress_ratios": list(cfg.ratios),
            "kv_source_layer_ids": list(cfg.kv_src),
            "index_source_layer_ids": list(cfg.idx_src),
            "index_n_heads": cfg.idx_heads,
            "index_head_dim": cfg.idx_dim,
            "index_topk": cfg.idx_topk,
            "candidate_source_layer_id": cfg.cand_layer,
            "candidate_topk_blocks": cfg.cand_blocks,
            "candidate_block_size": cfg.cand_size,
            "rope_theta": cfg.rope_theta,
            "compress_rope_theta": cfg.comp_theta,
            "rope_scaling": {
                "type": "yarn",
                "factor": cfg.factor,
                "beta_fast": cfg.bfast,
                "beta_slow": cfg.bslow,
                "original_max_position_embeddings": cfg.orig_len,
            },
            "hc_mult": cfg.hc,
            "hc_sinkhorn_iters": cfg.sink_iters,
            "hc_eps": cfg.hc_eps,
            **lookups(cfg, rows),
            "max_position_embeddings": 4096,
            "kv_fake_quantisation": cfg.qat,
        },
    }


def lookups(cfg, rows: list[int]) -> dict:
    """Its Engram and drafter."""
    return {
        "engram_layer_ids": list(cfg.eng_layers),
        "engram_vocab_size": cfg.eng_base,
        "engram_max_ngram_size": cfg.eng_max_n,
        "engram_n_heads": cfg.eng_heads,
        "engram_head_dim": cfg.eng_dim,
        "engram_pad_token_id": cfg.eng_pad,
        "engram_compressed_vocab_size": cfg.eng_cvocab,
        "engram_num_embeddings": rows,
        "dspark_block_size": cfg.block,
        "dspark_noise_token_id": cfg.noise,
        "dspark_markov_rank": cfg.rank,
        "dspark_target_layer_ids": list(cfg.targets),
        "dspark_n_routed_experts": cfg.d_experts,
        "dspark_num_experts_per_tok": cfg.d_topk,
    }


def write_tokenizer(folder: Path, numbers: list[int]) -> list[int]:
    """A tokenizer whose compressed ids are `numbers`, renumbered by appearance; those ids."""
    order: dict[int, int] = {}
    texts = []
    for token, number in enumerate(numbers):
        order.setdefault(number, len(order))
        # equal numbers: the same letters in another case, several ways
        seen = sum(1 for other in numbers[:token] if other == number)
        word = f"wxyz{number}"
        texts.append("".join(c.upper() if seen >> i & 1 else c for i, c in enumerate(word)))
    model = {"type": "WordLevel", "vocab": {t: i for i, t in enumerate(texts)}, "unk_token": "u"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    return [order[number] for number in numbers]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    if not (FOLDER / "ref_v41.py").is_file():
        pytest.skip("no reference beside the repository")
    sys.path.insert(0, str(FOLDER))
    try:
        target, dspark = (importlib.import_module(name) for name in ("ref_v41", "ref_dspark"))
    finally:
        sys.path.remove(str(FOLDER))
    cfg, model = target.tiny(False)
    folder = tmp_path_factory.mktemp("shared")
    ids = write_tokenizer(folder, model.map)
    cfg.eng_cvocab = max(ids) + 1
    model = target.Model(cfg, model.w, ids)
    (folder / "config.json").write_text(json.dumps(settings(cfg, model.rows.tolist())))
    save_file({k: v.contiguous() for k, v in model.w.items()}, folder / "model.safetensors")
    return target, dspark, model, RecipeDriver(folder, slots=8)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 500, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.mark.parametrize("place", range(len(LENGTHS)))
def test_prefill_drafts_and_rounds_equal_the_other_implementation(pair, place):
    target, dspark, model, driver = pair
    ids = prompts()[place]
    driver.poison()
    lane = driver.open(place, [9, 4, 31])
    state = target.State()
    logits, features, stage = model.forward(state, ids)
    model.commit(state, stage, len(ids), features)
    assert largest_error(driver.prefill([lane], [ids])[0], logits) <= LOGITS_ATOL
    for emitted in (3, 1, 6, 2):
        pending = int(logits[-1].argmax())
        for length in (5, 7):
            drafts, _, confidence = dspark.propose(model, state, pending, length, 0, None)
            sink = driver.propose([lane], [pending], length)
            assert [int(token) for token in sink.tokens] == drafts
            got = torch.stack(sink.forecasts)[:, 0]
            assert largest_error(got, torch.sigmoid(confidence)) <= LOGITS_ATOL
        row = [pending, *drafts]
        logits, features, stage = model.forward(state, row)
        model.commit(state, stage, emitted, features[:emitted])
        verified = driver.verify([lane], [row])
        assert largest_error(verified.output.logits[0], logits) <= LOGITS_ATOL
        driver.commit(verified, [emitted])
        logits = logits[:emitted]
