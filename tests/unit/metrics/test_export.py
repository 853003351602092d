"""Prometheus text: parses, adds up over engines, and is what load tools read."""

import threading

from prometheus_client.parser import text_string_to_metric_families

from flare_ray.metrics import names
from flare_ray.metrics.export import render
from flare_ray.metrics.recorder import Recorder


def engine(identity, drafts=0, accepted=()):
    recorder = Recorder("engine", identity)
    recorder.counter(names.SPEC_DRAFTS).add(drafts)
    recorder.counter(names.SPEC_DRAFT_TOKENS).add(5 * drafts)
    recorder.counter(names.SPEC_ACCEPTED_TOKENS).add(sum(accepted))
    for position, count in enumerate(accepted):
        recorder.counter(names.SPEC_ACCEPTED_PER_POSITION, str(position)).add(count)
    recorder.gauge(names.REQUESTS_RUNNING).set(2)
    recorder.histogram(names.TIME_TO_FIRST_TOKEN).observe(0.03)
    recorder.histogram(names.TIME_TO_FIRST_TOKEN).observe(3.0)
    return recorder.snapshot()


def text_of(snapshots, compat=True):
    return render(snapshots, model_name='a "model"', compat=compat).decode()


def values(text, name):
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def read_as_load_tools_do(text):
    """Sum every line of each stem, as the field's serving benchmark does."""
    totals = {"num_drafts": 0, "num_draft_tokens": 0, "per_pos": {}, "num_accepted_tokens": 0}
    for line in text.splitlines():
        if not line.startswith("vllm:spec_decode"):
            continue
        value = int(float(line.split()[-1]))
        if "num_drafts" in line:
            totals["num_drafts"] += value
        elif "num_draft_tokens" in line:
            totals["num_draft_tokens"] += value
        elif "num_accepted_tokens_per_pos" in line:
            position = int(line.split('position="')[1].split('"')[0])
            totals["per_pos"][position] = totals["per_pos"].get(position, 0) + value
        elif "num_accepted_tokens" in line:
            totals["num_accepted_tokens"] += value
    return totals


def test_speculation_counters_read_as_load_tools_read_them():
    text = text_of([engine("e1", 10, (8, 4)), engine("e2", 1, (1, 1, 1))])
    assert read_as_load_tools_do(text) == {
        "num_drafts": 11,
        "num_draft_tokens": 55,
        "per_pos": {0: 9, 1: 5, 2: 1},
        "num_accepted_tokens": 15,
    }


def test_engines_are_told_apart_by_label():
    text = text_of([engine("e1"), engine("e2")])
    found = values(text, names.REQUESTS_RUNNING.name)
    assert {dict(labels)["engine"] for labels in found} == {"e1", "e2"}
    assert {dict(labels)["model_name"] for labels in found} == {'a "model"'}


def test_aliases_are_exported_on_request_only():
    with_alias, without = text_of([engine("e1")]), text_of([engine("e1")], compat=False)
    assert "vllm:" not in without
    for alias in (names.REQUESTS_RUNNING.alias, names.TIME_TO_FIRST_TOKEN.alias + "_bucket"):
        assert values(with_alias, alias)


def test_histogram_buckets_are_cumulative_and_end_at_the_count():
    text = text_of([engine("e1")])
    stem = names.TIME_TO_FIRST_TOKEN.name
    buckets = [
        (float(dict(labels)["le"]), value)
        for labels, value in values(text, stem + "_bucket").items()
    ]
    counts = [value for _, value in sorted(buckets)]
    assert counts == sorted(counts)
    assert counts[-1] == 2 == next(iter(values(text, stem + "_count").values()))
    assert next(iter(values(text, stem + "_sum").values())) == 3.03


def test_ingress_series_carry_their_own_label():
    recorder = Recorder("ingress", "i1")
    recorder.counter(names.GENERATION_TOKENS).add()
    text = text_of([recorder.snapshot()])
    (labels,) = values(text, names.GENERATION_TOKENS.name + "_total")
    assert dict(labels)["ingress"] == "i1"


def test_probe_15_text_parses_while_another_thread_writes_and_counters_never_fall():
    recorder = Recorder("engine", "e1")
    stop = threading.Event()

    def write():
        while not stop.is_set():
            recorder.counter(names.GENERATION_TOKENS).add()
            recorder.histogram(names.END_TO_END).observe(0.1)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = []
        for _ in range(30):
            text = text_of([recorder.snapshot()])
            found = values(text, names.GENERATION_TOKENS.name + "_total")
            seen += found.values()
    finally:
        stop.set()
        writer.join()
    assert seen == sorted(seen) and seen[-1] > 0
