"""`LLM` over real rounds of a scripted model: text, batches, threads, cancellation, shutdown."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flare_ray import LLM, SamplingParams
from flare_ray.cli.llm import EngineSettings
from flare_ray.config import EngineConfig
from flare_ray.errors import CheckpointError, ConfigError, FlareError, InvalidRequest, RankFailure
from tests.rules.sources import ROOT
from tests.support.chat_checkpoint import write_chat_checkpoint
from tests.support.scripted.geometry import Script, write_checkpoint
from tests.support.scripted.recipe import DOTTED

WAIT_S = 20.0
VOCABULARY = 272
CONTEXT = 256
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def alphabet_cycle() -> tuple[int, ...]:
    """Every token is followed by the next id: `a` by `b`, and so on."""
    return tuple((token + 1) % VOCABULARY for token in range(VOCABULARY))


def make_checkpoint(folder: Path, **script) -> Path:
    script = {"next_tokens": alphabet_cycle(), "drafter": "prefix", "draft_right": 3, **script}
    write_checkpoint(folder, Script(vocab_size=VOCABULARY, **script))
    return write_chat_checkpoint(folder)


def open_llm(folder: Path, **settings) -> LLM:
    base = {"recipe": DOTTED, "device": "cpu", "dtype": "float32", "context_tokens": CONTEXT}
    return LLM(folder, **{**base, **settings})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="module")
def llm(folder) -> Iterator[LLM]:
    with open_llm(folder) as llm:
        yield llm


def idle(llm: LLM) -> bool:
    """Whether nothing runs and every page is free, soon."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        stats = llm.stats()
        if stats.running == stats.waiting == 0 and stats.free_pages == stats.total_pages:
            return True
        time.sleep(0.01)
    return False


def test_text_prompt_gives_its_continuation(llm):
    [output] = llm.generate("abc", GREEDY)
    assert output.text == "defghijklmno"
    assert (output.prompt, output.finish_reason) == ("abc", "length")
    assert output.usage.prompt_tokens == 3 and output.usage.completion_tokens == 12


def test_speculation_is_counted(folder):
    # A drafter that is right three times in five, offered at a fixed width.
    with open_llm(folder, speculation={"policy": "fixed", "fixed_width": 6}) as llm:
        [output] = llm.generate("abc", GREEDY)
    speculation = output.speculation
    assert 0 < speculation.drafts_accepted < speculation.drafts_offered
    assert speculation.rounds < output.usage.completion_tokens


def test_token_prompts_give_the_same_as_their_text(llm):
    ids = llm.encode("abc")
    [output] = llm.generate([ids], GREEDY)
    assert (output.text, output.prompt) == ("defghijklmno", None)
    assert output.prompt_token_ids == tuple(ids)


def test_more_prompts_than_slots_come_back_in_order(llm):
    letters = "abcdefghijklmn"
    outputs = llm.generate(list(letters), SamplingParams(temperature=0, max_tokens=1))
    assert "".join(output.text for output in outputs) == letters[1:] + "o"
    assert idle(llm)


def test_each_prompt_has_its_own_parameters(llm):
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 5)]
    assert [o.text for o in llm.generate(["a", "a"], params)] == ["b", "bcdef"]


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_tokens_ends_the_text(llm, include):
    params = SamplingParams(
        temperature=0, max_tokens=12, stop=("gh",), include_stop_str_in_output=include
    )
    [output] = llm.generate("abc", params)
    assert output.text == ("defgh" if include else "def")
    assert (output.finish_reason, output.stop_reason) == ("stop", "gh")


def test_stream_adds_up_to_the_whole(llm):
    parts = list(llm.stream("abc", GREEDY))
    assert "".join(part.text for part in parts) == "defghijklmno"
    assert [part.finished is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].finished.text == "defghijklmno"


def test_closed_stream_frees_its_slot_and_pages(llm):
    stream = llm.stream("a", SamplingParams(temperature=0, ignore_eos=True))
    next(stream)
    stream.close()
    assert idle(llm)


def test_chat_renders_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    [output] = llm.chat(messages, GREEDY)
    assert output.prompt_token_ids == tuple(llm.encode_chat(messages))
    assert len(llm.chat([messages, messages], GREEDY)) == 2


def test_chat_passes_options_that_the_template_reads_and_refuses_others(llm):
    messages = [{"role": "user", "content": "hi"}]
    plain = llm.encode_chat(messages)
    low = llm.encode_chat(messages, template_options={"reasoning_effort": "low"})
    assert plain != low
    with pytest.raises(InvalidRequest, match="not \\['mood'\\]"):
        llm.encode_chat(messages, template_options={"mood": "good"})


def test_threads_share_the_engine_and_keep_their_outputs(llm):
    texts: dict[str, list[str]] = {}

    def work(letter: str) -> None:
        texts[letter] = [o.text for o in llm.generate([letter] * 5, GREEDY)]

    threads = [threading.Thread(target=work, args=(letter,)) for letter in "aehk"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for letter in "aehk":
        expected = "".join(chr(ord(letter) + n) for n in range(1, 13))
        assert texts[letter] == [expected] * 5


def test_interrupt_cancels_the_call_and_the_engine_goes_on(llm):
    def interrupt_once_running() -> None:
        deadline = time.monotonic() + WAIT_S
        while llm.stats().running == 0 and time.monotonic() < deadline:
            time.sleep(0.005)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt_once_running)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        # Seconds of work, so that the signal finds the call waiting for output.
        llm.generate(["a"] * 5000, SamplingParams(temperature=0, ignore_eos=True))
    thread.join(WAIT_S)
    assert idle(llm)
    assert llm.generate("abc", GREEDY)[0].text == "defghijklmno"


def test_rank_that_fails_ends_its_calls_and_every_later_one(folder, monkeypatch):
    def fail(self, plan, masks=None):
        raise ArithmeticError("a kernel gave up")

    with open_llm(folder) as llm:
        monkeypatch.setattr("flare_ray.device.executor.RankExecutor.execute", fail)
        with pytest.raises(RankFailure, match="a kernel gave up"):
            llm.generate(["a", "b"], GREEDY)
        monkeypatch.undo()
        with pytest.raises(RankFailure, match="a kernel gave up"):
            llm.generate("a", GREEDY)


def test_program_that_forgets_to_close_ends_by_itself(folder):
    code = f"""
from flare_ray import LLM, SamplingParams
llm = LLM({str(folder)!r}, recipe={DOTTED!r}, device="cpu", dtype="float32", context_tokens=256)
print(llm.generate("abc", SamplingParams(temperature=0, max_tokens=3))[0].text)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "def\n", "")


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", None, "empty"),
        ([[]], None, "empty"),
        (["a", 7], None, r"prompts\[1\]: expected text or a list of token ids, got int"),
        ([1, 2], None, "a list in a list"),
        ([[1, True]], None, "list of token ids"),
        ([[VOCABULARY]], None, f"0..{VOCABULARY - 1}"),
        ("a" * CONTEXT, None, f"{CONTEXT} tokens and the context is {CONTEXT}"),
        (["a", "b"], [GREEDY], "1 sampling_params for 2 prompts"),
        ("a", SamplingParams(temperature=-1), "temperature"),
        ("a", SamplingParams(stop=("",)), "empty"),
    ],
)
def test_wrong_input_is_refused_before_anything_runs(llm, prompts, params, message):
    rounds = llm.stats().rounds
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompts, params)
    assert llm.stats().rounds == rounds


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == []


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_text_is_the_same_for_every_tensor_parallel_degree(folder, degree):
    with open_llm(folder, tensor_parallel_size=degree) as llm:
        assert llm.generate("abc", GREEDY)[0].text == "defghijklmno"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "speculation",
    [
        {"families": "ordinary"},
        {"draft_tokens": 0, "families": "speculative"},
        {"draft_tokens": 7, "policy": "fixed"},
    ],
)
def test_text_is_the_same_for_every_family_width_and_queue_depth(folder, speculation, depth):
    with open_llm(folder, speculation=speculation, queue_depth=depth) as llm:
        outputs = llm.generate(["abc", "q"], GREEDY)
        assert [o.text for o in outputs] == ["defghijklmno", "rstuvwxyz{|}"]


def test_eos_ends_a_text_unless_ignored(tmp_path):
    folder = make_checkpoint(tmp_path / "c", eos_ids=(llm_id("f"),))
    with open_llm(folder) as llm:
        [output] = llm.generate("abc", GREEDY)
        assert (output.text, output.finish_reason) == ("de", "stop")
        assert output.usage.completion_tokens == 3
        ignoring = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        assert llm.generate("abc", ignoring)[0].text == "defghijklmno"


def llm_id(letter: str) -> int:
    """Id of an ASCII letter in the tokeniser's sorted byte alphabet."""
    return ord(letter) - ord("!")


def test_nonfinite_logits_are_an_error_of_the_call_and_the_engine_goes_on(tmp_path):
    folder = make_checkpoint(tmp_path / "c", nan_tokens=(llm_id("f"),))
    with open_llm(folder) as llm:
        with pytest.raises(FlareError, match="finite"):
            llm.generate(["abc", "q"], GREEDY)
        assert llm.generate("q", GREEDY)[0].text == "rstuvwxyz{|}"
        assert idle(llm)


def test_closing_fails_the_requests_of_other_threads_and_refuses_new_ones(folder):
    llm = open_llm(folder)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            llm.generate(["a"] * 64, SamplingParams(temperature=0, ignore_eos=True))
        except FlareError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    deadline = time.monotonic() + WAIT_S
    while llm.stats().running == 0 and time.monotonic() < deadline:
        time.sleep(0.005)
    llm.close()
    thread.join(WAIT_S)
    assert failures and not thread.is_alive()
    with pytest.raises(InvalidRequest, match="closed"):
        llm.generate("a")
    llm.close()


def test_dropped_object_stops_its_threads(folder):
    before = threading.active_count()
    llm = open_llm(folder)
    assert threading.active_count() > before
    del llm
    deadline = time.monotonic() + WAIT_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_validated_configuration_opens_the_same_engine(folder):
    config = EngineConfig(
        checkpoint=str(folder), recipe=DOTTED, device="cpu", dtype="float32", context_tokens=CONTEXT
    )
    with LLM.from_config(config) as llm:
        assert llm.generate("abc", GREEDY)[0].text == "defghijklmno"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"concurency": 2}, ConfigError, "^concurency: no such setting"),
        ({"concurrency": 0}, ConfigError, "^concurrency: .* got 0"),
        ({"speculation": {"draft_tokens": 9}}, ConfigError, "^speculation.draft_tokens: "),
        ({"recipe": "absent"}, ConfigError, "absent"),
    ],
)
def test_wrong_setting_is_named(folder, settings, error, message):
    with pytest.raises(error, match=message):
        open_llm(folder, **settings)


def test_absent_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        open_llm(tmp_path / "nowhere")


def test_settings_are_the_fields_of_the_configuration():
    assert set(EngineSettings.__annotations__) | {"checkpoint"} == set(EngineConfig.model_fields)
