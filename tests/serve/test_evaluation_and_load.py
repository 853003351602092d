"""Programs that people point at a server: lm-eval and load tools, over the demo checkpoint.

All are started as their users start them. lm-eval and locust come with the `clients` extra,
guidellm by itself; what is absent is skipped by name.
"""

import csv
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rules.sources import ROOT
from tests.serve.processes import gauge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DEMO = ROOT / "deployments" / "demo" / "glm"
TASKS = ROOT / "tests" / "serve" / "lm_eval"
RUN_LIMIT_S = 240.0
FREE_LIMIT_S = 10.0
USERS = 6
LOAD_S = 8
GUIDED_REQUESTS = 6
GUIDED_TOKENS = 16
LIKELIHOOD_TOLERANCE = 2e-4
"""Of a sum over up to twenty tokens in float32, in another order (measured: 4e-5)."""


def run_program(module: str, *arguments: str, folder: Path) -> str:
    """`python -m MODULE ARGUMENTS` from the repository's root, offline; its output."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed (extra: clients)")
    found = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HOME": str(folder / "home"), "OPENAI_API_KEY": "none"},
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    return found.stdout


def wait_idle(url: str) -> None:
    deadline = time.monotonic() + FREE_LIMIT_S
    while gauge(url, "flare_num_requests_running") or gauge(url, "flare_num_requests_waiting"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def likelihood(tmp_path_factory):
    """Sum of log-probabilities of a continuation by transformers, in this process."""
    import torch
    from transformers import AutoTokenizer, Glm5NextForConditionalGeneration

    from benchmarks.support.float32_checkpoint import write_float32

    folder = tmp_path_factory.mktemp("float32")
    write_float32(DEMO, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Glm5NextForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def total(context: str, continuation: str) -> tuple[float, bool, int]:
        """The sum, whether every token is the likeliest one, and how many they are."""
        given = len(tokenizer(context, add_special_tokens=False).input_ids)
        ids = tokenizer(context + continuation, add_special_tokens=False).input_ids
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, given - 1 : -1]
        wanted = torch.tensor(ids[given:])
        logprobs = torch.log_softmax(logits, -1).gather(1, wanted[:, None])
        return float(logprobs.sum()), bool((logits.argmax(-1) == wanted).all()), len(wanted)

    return total


@pytest.mark.parametrize("tokenised", [True, False])
def test_lm_eval_scores_and_generates(demo_url, likelihood, tmp_path, tokenised):
    """Some continuations are followed by an EOS, which lm-eval has to be told of."""
    model = {
        "model": "glm-demo",
        "base_url": f"{demo_url}/v1/completions",
        "tokenizer": str(DEMO),
        "tokenized_requests": str(tokenised),
        "num_concurrent": "3",
        "max_length": "2048",
    }
    run_program(
        "lm_eval",
        *("--model", "local-completions"),
        *("--model_args", ",".join(f"{key}={value}" for key, value in model.items())),
        *("--tasks", "flare_choices,flare_texts", "--include_path", str(TASKS)),
        *("--output_path", str(tmp_path / "out"), "--log_samples"),
        folder=tmp_path,
    )
    compared, longest = 0, 0
    for sample in samples(tmp_path / "out", "flare_choices"):
        for place, (response,) in enumerate(sample["resps"]):
            asked = sample["arguments"][f"gen_args_{place}"]
            total, greedy, count = likelihood(asked["arg_0"], asked["arg_1"])
            assert float(response[0]) == pytest.approx(total, abs=LIKELIHOOD_TOLERANCE)
            assert response[1] == str(greedy)
            compared, longest = compared + 1, max(longest, count)
    assert compared == 9
    assert longest > 10
    (first,) = [s for s in samples(tmp_path / "out", "flare_texts") if s["doc_id"] == 0]
    assert first["exact_match"] == 1.0
    wait_idle(demo_url)


def samples(folder: Path, task: str) -> list[dict]:
    (file,) = folder.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_locust_sees_no_failure(demo_url, tmp_path):
    run_program(
        "locust",
        *("--locustfile", str(ROOT / "tests" / "serve" / "locustfile.py"), "--headless"),
        *("--users", str(USERS), "--spawn-rate", str(USERS), "--run-time", f"{LOAD_S}s"),
        *("--stop-timeout", "20", "--host", demo_url, "--csv", str(tmp_path / "load")),
        folder=tmp_path,
    )
    with (tmp_path / "load_stats.csv").open(encoding="utf-8") as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    assert int(rows["Aggregated"]["Failure Count"]) == 0
    for name in ("/v1/chat/completions", "/v1/completions", "/v1/completions (left)"):
        assert int(rows[name]["Request Count"]) > 0
    assert int(rows["Aggregated"]["Request Count"]) > 3 * USERS
    wait_idle(demo_url)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_measures_streams(demo_url, tmp_path, path):
    backend = {
        "kind": "openai_http",
        "target": demo_url,
        "model": "glm-demo",
        "request_format": path,
        # It asks for usage in every chunk otherwise, which is refused by name.
        "extras": {"body": {"stream_options": {"continuous_usage_stats": False}}},
    }
    result = tmp_path / "result.json"
    run_program(
        "guidellm",
        *("run", "--backend", json.dumps(backend)),
        *("--profile", "kind=concurrent,streams=3"),
        *("--constraint", f"kind=max_requests,count={GUIDED_REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={DEMO}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=48,output_tokens={GUIDED_TOKENS}"),
        *("--output", f"kind=json,path={result}", "--disable-console"),
        folder=tmp_path,
    )
    (benchmark,) = json.loads(result.read_text(encoding="utf-8"))["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"]
    assert len(requests["successful"]) == GUIDED_REQUESTS
    for request in requests["successful"]:
        assert request["output_metrics"]["text_tokens"] == GUIDED_TOKENS
    wait_idle(demo_url)
