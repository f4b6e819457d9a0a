"""The sections ``engine``, ``weights`` and ``adapters``, and vLLM's environment variables for engine keys."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from adapters.residency import HALF_LIFE_S
from gateway.config.section import Folder, Section


class WeightsSection(Section):
    """Where fetched models are stored, and how S3 is accessed; the AWS SDK finds the credentials."""

    cache_folder: Annotated[str, Field(min_length=1)] = "~/.cache/sluice"
    endpoint_url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    region: str | None = None
    connections: Annotated[int, Field(ge=1, le=64)] = 8
    connect_timeout_seconds: Annotated[float, Field(gt=0, le=60)] = 5.0
    read_timeout_seconds: Annotated[float, Field(gt=0, le=300)] = 20.0
    timeout_seconds: Annotated[float, Field(gt=0, le=86_400)] = 7200.0


_S3Prefix = Annotated[str, Field(max_length=1_024, pattern=r"^s3://[A-Za-z0-9][A-Za-z0-9._-]+(/.*)?$")]


class AdaptersConfig(Section):
    """The LoRA registry in the store ``state_url``, else the state store; each start imports ``file``."""

    file: str | None = None
    state_url: Annotated[str, Field(min_length=1)] | None = None
    folder: Annotated[str, Field(min_length=1)] | None = None
    base_names: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ()
    s3_prefixes: Annotated[tuple[_S3Prefix, ...], Field(max_length=256)] = ()
    half_life_seconds: Annotated[float, Field(ge=1, le=604_800)] = HALF_LIFE_S
    preload_timeout_seconds: Annotated[float, Field(ge=0, le=3600)] = 60.0
    fetch_timeout_seconds: Annotated[float, Field(gt=0, le=86_400)] = 3600.0


DEMO_MODEL = "models/demo"
# Data installed with the package: the demo model and the prompt versions. In a clone these are links.
BUNDLED = Path(__file__).parents[1] / "bundled"


def installed_model(model: str) -> str:
    """The folder of a model; the installed demo model where the working folder has none."""
    return model if model != DEMO_MODEL or Path(model).is_dir() else str(BUNDLED / "demo")


# The environment variables that operators of vLLM set in their containers: our keys in capitals.
ENGINE_ENV = (
    "TENSOR_PARALLEL_SIZE", "GPU_MEMORY_UTILIZATION", "MAX_MODEL_LEN", "MAX_NUM_SEQS",
    "MAX_NUM_BATCHED_TOKENS", "BLOCK_SIZE", "ENABLE_PREFIX_CACHING", "QUANTIZATION", "ENFORCE_EAGER",
)  # fmt: skip

# Keys that only one kind of engine supports.
VLLM_ONLY = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "distributed_executor_backend",
    "quantization",
    "max_cpu_loras",
    "tool_parser",
    "reasoning_parser",
    "extra_args",
    "visible_devices",
)
EMBEDDED_ONLY = ("device",)
# Keys that need a model that generates text; ``task: embed`` computes vectors and scores.
GENERATING_ONLY = ("max_loras", "tool_parser", "reasoning_parser")


class EngineSection(Section):
    """An in-process engine. The defaults are chosen for an A10G (24 GB) with Llama-3-8B in AWQ:

    * ``gpu_memory_utilization`` 0.92 leaves 8 % for workspace and the driver; 0.95 ran out of memory with
      many adapters, 0.90 wasted KV cache.
    * ``max_num_seqs`` 128 is what the KV pool holds at 1,100 tokens per sequence; more cause preemptions.
    * ``max_num_batched_tokens`` unset depends on the kind: vLLM gets 8,192, so that one or two long prompts
      do not crowd out fifty short ones; the embedded engine, which runs on a CPU, takes shorter steps.
    * ``block_size`` 16: 8 costs block-table overhead, 32 wastes memory on short answers.
    * ``enable_prefix_caching``: 72 % of the requests share a system prompt.
    * ``enforce_eager`` off: CUDA graphs are 15-20 % faster; they are captured before the engine is ready.
    * ``max_restarts_per_hour`` 5: a worker that fails more often has a cause that a restart does not remove.
    * ``stopped_seconds`` 0.5: with a check every 0.25 s, a stopped engine is found within 0.75 s.
    * ``tool_parser`` and ``reasoning_parser`` unset are derived from the model; ``none`` uses no parser.
    * ``task`` embed returns only vectors; ``visible_devices`` unset uses all GPUs visible to the process.
    * ``quantization`` unset takes the value of the checkpoint's configuration (AWQ for an AWQ checkpoint).
    """

    kind: Literal["embedded", "vllm", "none"] = "embedded"
    model: Annotated[str, Field(min_length=1, validate_default=True), AfterValidator(installed_model)] = (
        DEMO_MODEL
    )
    tokenizer: Annotated[Folder, AfterValidator(installed_model)] | None = None
    served_model_name: str | None = None
    max_model_len: Annotated[int, Field(ge=64, le=1_048_576)] = 4096
    block_size: Annotated[int, Field(ge=1, le=256)] = 16
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 128
    max_num_batched_tokens: Annotated[int, Field(ge=16, le=1_048_576)] | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kv_cache_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 50)] | None = None
    num_blocks: Annotated[int, Field(ge=1, le=1 << 32)] | None = None
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    enable_prefix_caching: bool = True
    share_prefix_across_tenants: bool = False
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.92
    quantization: Annotated[str, Field(min_length=1)] | None = None
    task: Literal["generate", "embed"] = "generate"
    visible_devices: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+(,[A-Za-z0-9_-]+)*$")] | None = None
    enforce_eager: bool = False
    tensor_parallel_size: Annotated[int, Field(ge=1, le=1024)] = 1
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=1024)] = 1
    distributed_executor_backend: Literal["mp", "ray"] | None = None
    max_loras: Annotated[int, Field(ge=0, le=1024)] = 8
    max_cpu_loras: Annotated[int, Field(ge=1, le=4096)] | None = None
    max_lora_rank: Annotated[int, Field(ge=1, le=512)] = 64
    tool_parser: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    reasoning_parser: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    max_restarts_per_hour: Annotated[int, Field(ge=0, le=1000)] = 5
    hang_seconds: Annotated[float, Field(ge=1, le=3600)] = 30.0
    stopped_seconds: Annotated[float, Field(ge=0.25, le=3600)] = 0.5
    start_timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 600.0
    extra_args: dict[str, Any] = Field(default={})

    @model_validator(mode="after")
    def _kind_honours_every_key(self) -> Self:
        """Refuse, instead of ignoring, a changed key that the engine's kind does not support."""
        other, kind = {
            "embedded": (VLLM_ONLY, "vllm"),
            "vllm": (EMBEDDED_ONLY, "embedded"),
            "none": ((), ""),
        }[self.kind]
        for name in other:
            neutral = type(self).model_fields[name].get_default(call_default_factory=True)
            if (given := getattr(self, name)) != neutral:
                raise ValueError(
                    f"{name}: {given!r} is given, but engine.kind is {self.kind}, which has no such setting; "
                    f"allowed: leave it out, or engine.kind: {kind}"
                )
        for name in GENERATING_ONLY if self.task == "embed" else ():
            if name in self.model_fields_set and getattr(self, name) not in (None, 0):
                raise ValueError(f"{name}: task embed generates nothing; allowed: leave it out")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras: {self.max_cpu_loras} is less than max_loras ({self.max_loras}); "
                "allowed: at least as many"
            )
        return self

    @property
    def model_id(self) -> str:
        """The base model's public id: ``served_model_name``, else the name of the model's folder."""
        return self.served_model_name or Path(self.model).resolve().name

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of ``tokenizer.json``: ``tokenizer``, else the model's folder."""
        return Path(self.tokenizer or self.model)
