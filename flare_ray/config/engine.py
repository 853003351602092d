"""Configuration of one engine: the model, its ranks, memory, speculation and admission."""

from __future__ import annotations

from os.path import expanduser
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from flare_ray.contracts.shapes import MAX_WIDTH


class SpeculationConfig(BaseModel, frozen=True, extra="forbid"):
    """How many drafts a round may offer; the catalog holds widths (drafts plus the pending
    token)."""

    families: Literal["both", "ordinary", "speculative"] = Field(
        "both",
        description="Prepared program families: ordinary = --no-mtp (no drafter), speculative = "
        "--mtp-only; both by default (contract: R6).",
    )
    draft_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_WIDTH - 1,
        description="Largest draft count K; None = the recipe's default; 0 = prepare or serve "
        "width-one rounds only.",
    )
    widths: tuple[int, ...] | None = Field(
        None,
        description="Prepared verification widths, increasing, containing 1, last = K + 1; None = "
        "every width 1..K+1 (contract: G5).",
    )
    token_capacity: int = Field(
        128, ge=1, le=4096, description="Largest B * W (rows) of a wide round (contract: G1)."
    )
    packed_rows: tuple[int, ...] = Field(
        (),
        description="Besides rectangular rounds prepare packed ones, whose lanes share this many "
        "rows each on average, assigned every round by the drafter's forecasts (contract: C4); "
        "increasing, from 2 on. For drafters that forecast; () = none.",
    )
    policy: Literal["adaptive", "fixed"] = Field(
        "adaptive", description="How a round's width is chosen among the prepared ones."
    )
    fixed_width: int | None = Field(
        None,
        ge=1,
        le=MAX_WIDTH,
        description="Width under policy=fixed; must be prepared; None = the largest. Applies where "
        "token_capacity admitted it, width one elsewhere.",
    )
    objective: Literal["throughput", "latency", "slo"] = Field(
        "throughput",
        description="What an adaptive width is chosen for. throughput: the mean relative speed of "
        "the round's requests, which is the token rate where freed slots are filled again; "
        "latency: their mean time per token; slo: throughput among the widths at which every "
        "request is expected to keep inter_token_slo_ms, and prompts are held back for it.",
    )
    inter_token_slo_ms: float | None = Field(
        None,
        gt=0,
        description="Under objective=slo: target for the mean time between two tokens of a "
        "request, in milliseconds.",
    )
    decision_log: str | None = Field(
        None,
        description="File to which every decision about widths and what it rested on is written, "
        "for `flare-ray policy explain`; grows by about 100 bytes per request and round.",
    )
    history_drafts: bool = Field(
        False,
        description="Copy drafts from what earlier requests of the same cache_salt generated, the "
        "last 65,536 tokens of the engine, where copies are expected to pass further than the "
        "drafter's own (contract: H1, H2).",
    )
    request_drafts: bool = Field(
        False,
        description="Copy drafts from the request's own prompt and output, under the same law "
        "(contract: H3).",
    )
    learned_drafts: bool = Field(
        True,
        description="Offer the drafter's own drafts; false leaves copied ones alone, and rounds of "
        "width one where there is nothing to copy.",
    )

    @property
    def copies(self) -> tuple[str, ...]:
        """Settings that ask for copied drafts."""
        asked = ("history_drafts", "request_drafts")
        return tuple(name for name in asked if getattr(self, name))

    @model_validator(mode="after")
    def _copies_consistent(self) -> SpeculationConfig:
        if self.learned_drafts:
            return self
        if not self.copies:
            raise ValueError(
                "learned_drafts: false leaves copied drafts alone; set history_drafts or "
                "request_drafts"
            )
        if self.packed_rows:
            raise ValueError(
                "packed_rows are assigned by forecasts of learned drafts; drop them or "
                "learned_drafts: false"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> SpeculationConfig:
        widths = self.widths
        if widths is not None:
            if list(widths) != sorted(set(widths)) or widths[:1] != (1,) or widths[-1] > MAX_WIDTH:
                raise ValueError(
                    f"widths must increase, start at 1 and end at {MAX_WIDTH} or below, got "
                    f"{list(widths)}"
                )
            if self.draft_tokens is not None and widths[-1] != self.draft_tokens + 1:
                raise ValueError(
                    f"the largest width must be draft_tokens + 1 = {self.draft_tokens + 1}, got "
                    f"{widths[-1]}; change widths or draft_tokens"
                )
        packed = list(self.packed_rows)
        if packed != sorted(set(packed)) or (packed and packed[0] < 2):
            raise ValueError(f"packed_rows must increase, from 2 on, got {packed}")
        if packed and self.policy == "fixed":
            raise ValueError("packed_rows are chosen by policy: adaptive; drop them or the policy")
        if (self.inter_token_slo_ms is not None) != (self.objective == "slo"):
            raise ValueError(
                f"objective {self.objective} with inter_token_slo_ms {self.inter_token_slo_ms}: "
                "objective: slo needs inter_token_slo_ms, and the others take none"
            )
        if self.objective == "slo" and self.policy == "fixed":
            raise ValueError(
                "objective: slo chooses widths, policy: fixed does not; drop one of them"
            )
        if self.fixed_width is not None and self.policy != "fixed":
            raise ValueError("fixed_width needs policy: fixed")
        return self


class AdmissionConfig(BaseModel, frozen=True, extra="forbid"):
    """Bounds on what the engine accepts (contract: C1)."""

    max_waiting: int = Field(
        64, ge=0, description="Requests that may wait for a slot; one more is answered 429."
    )
    max_waiting_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens, prompts and max_tokens, of the requests that may wait for a slot; one "
        "more request is answered 429 unless it would wait alone; None = any number.",
    )
    retry_after_s: float = Field(
        2.0,
        gt=0,
        description="Least seconds in the Retry-After header of an overload answer; what is told "
        "follows from how fast the queue drains.",
    )
    max_retry_after_s: float = Field(
        60.0, gt=0, description="Most seconds in the Retry-After header of an overload answer."
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="Longest prompt accepted; None = context_tokens - 1."
    )
    preemption: bool = Field(
        True,
        description="Admit requests on their prompts' pages and preempt the youngest of lowest "
        "priority when pages run out; off = a request waits until all pages that it could ever "
        "need are free, and is never interrupted.",
    )

    @model_validator(mode="after")
    def _retry_bounds_in_order(self) -> AdmissionConfig:
        if self.max_retry_after_s < self.retry_after_s:
            raise ValueError(
                f"max_retry_after_s {self.max_retry_after_s:g} is below retry_after_s "
                f"{self.retry_after_s:g}; raise the former or lower the latter"
            )
        return self


class PrefixCacheConfig(BaseModel, frozen=True, extra="forbid"):
    """Reuse of prefixes: snapshots of state beside pages that requests share (contract: M4)."""

    enabled: bool = Field(
        True,
        description="Keep and reuse prefixes; off = no memory is set aside for any tier and no "
        "file is touched.",
    )
    device_bytes: int | None = Field(
        None,
        ge=1,
        description="Bytes per rank for snapshots of state; their pages come out of the page pool, "
        "which takes them back when requests need them. None = eight snapshots per slot.",
    )
    host_bytes: int = Field(
        0,
        ge=0,
        description="Host memory per rank for copies of prefixes that the device gives up, "
        "page-locked on CUDA; taken at the start. 0 = no host tier.",
    )
    disk_path: str | None = Field(
        None,
        min_length=1,
        description="Folder for prefixes that survive a restart; each engine takes a directory of "
        "its own in it. Needs host_bytes, through which they pass. None = no disk tier.",
    )
    disk_bytes: int = Field(
        16 << 30,
        ge=1,
        description="Most bytes per rank below disk_path.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> PrefixCacheConfig:
        if self.disk_path is not None and not self.host_bytes:
            raise ValueError(
                "disk_path needs host_bytes: prefixes reach the disk through host memory; set "
                "host_bytes to a few prefixes at least"
            )
        return self


class SamplingConfig(BaseModel, frozen=True, extra="forbid"):
    """How requests are sampled and reported where they leave it open."""

    reproducible: Literal["on_request", "seeded", "always"] = Field(
        "seeded",
        description="Which requests draw by position, so that their text depends on neither width, "
        "batch nor drafts (contract: S4, S8), where they do not say themselves: none, those with a "
        "seed, or all.",
    )
    logprobs: Literal["raw", "processed"] = Field(
        "raw",
        description="What log-probabilities describe: raw = the model's own distribution; "
        "processed = the one drawn from, after penalties, bias, bans, grammar, temperature and "
        "filters. Those of prompts are always raw.",
    )


class GrammarConfig(BaseModel, frozen=True, extra="forbid"):
    """Output held to a JSON schema, a regular expression, a grammar or tools (contract: K1)."""

    enabled: bool = Field(
        True,
        description="Prepare masked rounds and accept constrained requests; needs the extra "
        "`grammar`.",
    )
    preload: bool = Field(
        False,
        description="Load the grammar library and start the compiling process with the engine (400 "
        "MB of memory) instead of with the first constrained request, which waits some seconds; on "
        "CPU, time and record masked rounds, too, which lengthens a start by seconds.",
    )
    full_width: bool = Field(
        True,
        description="Constrained requests take drafts; off = width one, in rounds of their own.",
    )
    own_rounds: bool = Field(
        False,
        description="Constrained requests never share a round with others. Off = they do, and the "
        "others wait for the masks too, which costs less than a second round.",
    )
    compile_timeout_s: float = Field(
        10.0, gt=0, description="Seconds one grammar may take to compile; one more is answered 400."
    )
    compile_memory_bytes: int = Field(
        1 << 30, ge=1 << 26, description="Memory that compiling one grammar may take."
    )
    max_source_bytes: int = Field(
        1 << 16, ge=256, description="Largest grammar, schemas of tools included."
    )
    cache_bytes: int = Field(
        1 << 26, ge=1 << 20, description="Compiled grammars kept for reuse; the largest one, too."
    )


class EngineConfig(BaseModel, frozen=True, extra="forbid"):
    """One engine: a checkpoint served by `tensor_parallel_size` ranks on one node."""

    checkpoint: Annotated[str, AfterValidator(expanduser)] = Field(
        description="Folder with config.json, *.safetensors and tokenizer.json; ~ is the home."
    )
    recipe: str | None = Field(
        None, description="Recipe name; None = found from the checkpoint's architectures."
    )
    tensor_parallel_size: Literal[1, 2, 4, 8] = Field(
        1, description="Ranks per engine (contract: A1); the recipe states which degrees it splits."
    )
    device: Literal["cpu", "cuda"] = Field(
        "cuda", description="Where ranks run; cpu runs the eager backend over gloo."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Activation and unquantised weight type; CPU serves float32."
    )
    concurrency: int = Field(
        4, ge=1, le=256, description="Requests decoded together; slots of the engine."
    )
    context_tokens: int = Field(
        4096,
        ge=2,
        description="Longest prompt plus output, in tokens; at most the model's maximum.",
    )
    page_pool_tokens: int | None = Field(
        None,
        ge=64,
        description="Tokens the page pool holds over all requests; None = concurrency * "
        "context_tokens.",
    )
    prefill_tokens: int = Field(
        512, ge=1, le=8192, description="Rows of one prefill chunk; smaller = shorter stalls."
    )
    queue_depth: Literal[1, 2] = Field(
        1, description="Rounds submitted ahead (contract: T6); 2 hides host time, costs dead lanes."
    )
    threads_per_rank: int = Field(
        1, ge=1, le=256, description="CPU threads of each rank; fixed at preparation."
    )
    kv_dtype: Literal["float32", "bfloat16"] | None = Field(
        None,
        description="Type of the KV cache where the checkpoint declares another (FP8): states that "
        "it is kept in `dtype` instead, which must be named here; None = such a declaration is "
        "refused (contract: R5).",
    )
    quantised_activations: Literal["as_declared", "never"] = Field(
        "as_declared",
        description="Experts declared W4A4 (an input scale beside 4-bit weights): as_declared = "
        "refused until the engine rounds activations; never = run as W4A16, named in the log.",
    )
    expert_weights: Literal["auto", "packed", "dequantised"] = Field(
        "auto",
        description="Routed experts of 4-bit and FP8 checkpoints in memory: packed = as stored, or "
        "the start is refused; auto = packed on CUDA wherever a kernel unpacks them, dequantised "
        "on CPU, where the packed form gives the same bits slowly.",
    )
    tables: Literal["device", "host", "disk"] = Field(
        "device",
        description="Where hashed n-gram tables lie (contract: M8): device = where programs run; "
        "host = host memory, page-locked for CUDA and read by its programs; disk = in the "
        "checkpoint's files, read row by row (CPU only). Off the device they keep their stored "
        "type.",
    )
    eager: bool = Field(
        False, description="Run without CUDA graphs (debugging); always so on CPU (contract: G6)."
    )
    core: str | None = Field(
        None,
        min_length=1,
        description="Folder that `flare-ray prepare` wrote: measured prices, memory of graphs and "
        "compiled kernels are taken from it, and only what it holds may be selected (contract: "
        "G7). None = everything is measured at the start.",
    )
    debug_checks: bool = Field(
        False,
        description="Overwrite freed pages, snapshot rows and slots with NaN, and compare the "
        "controller's and the ranks' books with their state: on every rank after each round, on "
        "the host when the engine goes idle. Stops the engine at the first difference; slow.",
    )
    rank_timeout_s: float = Field(
        60.0, gt=0, description="Seconds without a reply after which a rank counts as hung."
    )
    speculation: SpeculationConfig = Field(
        default_factory=SpeculationConfig, description="Drafts and widths."
    )
    admission: AdmissionConfig = Field(
        default_factory=AdmissionConfig, description="Bounds on accepted work."
    )

    prefix_cache: PrefixCacheConfig = Field(
        default_factory=PrefixCacheConfig, description="Reuse of prefixes."
    )
    sampling: SamplingConfig = Field(
        default_factory=SamplingConfig, description="Reproducible texts and log-probabilities."
    )
    grammar: GrammarConfig = Field(default_factory=GrammarConfig, description="Constrained output.")

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        if self.kv_dtype is not None and self.kv_dtype != self.dtype:
            raise ValueError(
                f"kv_dtype {self.kv_dtype} differs from dtype {self.dtype}: the cache is kept in "
                "the activations' type; name the same one"
            )
        pool = self.page_pool_tokens
        if pool is not None and pool < self.context_tokens:
            raise ValueError(
                f"page_pool_tokens {pool} is below context_tokens {self.context_tokens}: one "
                "request could never finish; raise the pool or lower the context"
            )
        return self
