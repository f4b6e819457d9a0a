"""LoRA adapters give PEFT's tokens, alone and mixed; running requests keep a replaced or removed adapter."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.errors import AdapterNotLoaded, NoAdapterRoom, RequestedAdapterMissing
from engine.lora import PRODUCTS, AdapterBank, LoraWeights
from engine.sequence import AdapterVersion
from engine.values import GenerationRequest
from tests.engine.adapters import peft_greedy, write_adapter
from tests.engine.support import (
    DEMO_MODEL,
    greedy,
    random_prompts,
    reference_greedy,
    run_to_end,
    write_tiny_model,
)

MAX_TOKENS = 16
PROMPTS = tuple(random_prompts(8, 512, longest=60))
NAMES = ("wide", "narrow", "rs")
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session", params=["tiny", "demo"])
def lora_model(request: pytest.FixtureRequest, tiny_model: Path) -> Path:
    return tiny_model if request.param == "tiny" else DEMO_MODEL


@pytest.fixture(scope="session")
def adapters(lora_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapter folders of different ranks, targets and scales."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "wide": write_adapter(folder / "wide", lora_model, seed=1, rank=16, alpha=48),
        "narrow": write_adapter(
            folder / "narrow", lora_model, seed=2, rank=3, alpha=12, targets=["q_proj", "v_proj", "up_proj"]
        ),
        "rs": write_adapter(
            folder / "rs", lora_model, seed=3, alpha=9, targets=["o_proj", "down_proj"], use_rslora=True
        ),
    }


@cache
def reference(model: Path, adapter: Path | None) -> list[list[int]]:
    if adapter is None:
        return reference_greedy(model, PROMPTS, MAX_TOKENS)
    return peft_greedy(model, adapter, PROMPTS, MAX_TOKENS)


def load(engine: Engine, adapter_id: str, folder: Path) -> None:
    engine.install_adapter(adapter_id, engine.read_adapter(folder))


def request(
    name: str,
    prompt: tuple[int, ...],
    adapter_id: str | None,
    max_tokens: int = MAX_TOKENS,
    **options: object,
) -> GenerationRequest:
    return GenerationRequest(name, prompt, greedy(max_tokens, **options), adapter_id=adapter_id)


@pytest.mark.parametrize("name", NAMES)
def test_each_adapter_alone_gives_the_tokens_of_peft(
    lora_model: Path, adapters: dict[str, Path], make_engine: MakeEngine, name: str
) -> None:
    engine = make_engine(lora_model)
    load(engine, name, adapters[name])
    requests = [request(str(n), prompt, name) for n, prompt in enumerate(PROMPTS[1::2])]
    answers = [run_to_end(engine, [one])[one.request_id].token_ids for one in requests]
    assert answers == reference(lora_model, adapters[name])[1::2]
    assert answers != reference(lora_model, None)[1::2]


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 40}, {"num_blocks": 14}])
def test_three_adapters_and_the_base_mixed_in_one_batch_of_32_give_each_its_own_tokens(
    lora_model: Path, adapters: dict[str, Path], make_engine: MakeEngine, options: dict[str, object]
) -> None:
    engine = make_engine(lora_model, max_num_seqs=32, **options)
    for name in NAMES:
        load(engine, name, adapters[name])
    asked = [(n, name) for n in range(len(PROMPTS)) for name in (*NAMES, None)]
    # The engine generates past the end token, so that all stay in the batch; PEFT stops there.
    requests = [request(f"{n} {name}", PROMPTS[n], name, ignore_eos=True) for n, name in asked]
    answers = run_to_end(engine, requests)
    for n, name in asked:
        expected = reference(lora_model, adapters[name] if name else None)[n]
        assert answers[f"{n} {name}"].token_ids[: len(expected)] == expected, (n, name)
    if options.get("num_blocks"):
        assert engine.signals.preemptions > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is here")
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_on_cuda_adapters_mixed_with_the_base_give_each_its_own_tokens(
    lora_model: Path, adapters: dict[str, Path], make_engine: MakeEngine, enforce_eager: bool
) -> None:
    engine = make_engine(
        lora_model, device="cuda", dtype="float32", max_num_seqs=32, enforce_eager=enforce_eager
    )
    for name in NAMES:
        load(engine, name, adapters[name])
    asked = [(n, name) for n in range(len(PROMPTS)) for name in (*NAMES, None)]
    answers = run_to_end(
        engine, [request(f"{n} {name}", PROMPTS[n], name, ignore_eos=True) for n, name in asked]
    )
    for n, name in asked:
        expected = reference(lora_model, adapters[name] if name else None)[n]
        assert answers[f"{n} {name}"].token_ids[: len(expected)] == expected, (n, name)


def test_after_a_replacement_new_requests_use_the_new_adapter_and_running_ones_finish_with_the_old(
    lora_model: Path, adapters: dict[str, Path], make_engine: MakeEngine
) -> None:
    engine = make_engine(lora_model)
    load(engine, "a", adapters["wide"])
    answers: dict[str, list[int]] = {}

    def add(name: str, n: int) -> None:
        engine.add(request(name, PROMPTS[n], "a"))
        answers[name] = []

    def step() -> None:
        for output in engine.step():
            answers[output.request_id] += output.token_ids

    for n in range(4):
        add(f"old {n}", n)
    step()
    step()
    load(engine, "a", adapters["narrow"])
    for n in range(4):
        add(f"new {n}", n)
    step()
    engine.remove_adapter("a")
    with pytest.raises(RequestedAdapterMissing):
        engine.add(request("late", PROMPTS[0], "a"))
    while engine.has_work:
        step()
    assert [answers[f"old {n}"] for n in range(4)] == reference(lora_model, adapters["wide"])[:4]
    assert [answers[f"new {n}"] for n in range(4)] == reference(lora_model, adapters["narrow"])[:4]


def test_cached_prefixes_are_not_shared_between_adapters_nor_with_the_one_that_was_replaced(
    lora_model: Path, adapters: dict[str, Path], make_engine: MakeEngine
) -> None:
    engine = make_engine(lora_model)
    n, prompt = max(enumerate(PROMPTS), key=lambda item: len(item[1]))
    assert len(prompt) > 2 * 16

    def ask(name: str | None) -> tuple[list[int], int]:
        answer = run_to_end(engine, [request("x", prompt, name)])["x"]
        assert answer.last is not None
        return answer.token_ids, answer.last.cached_tokens

    load(engine, "a", adapters["wide"])
    load(engine, "b", adapters["rs"])
    of_wide, of_rs, of_narrow = (
        reference(lora_model, adapters[name])[n] for name in ("wide", "rs", "narrow")
    )
    assert ask(None) == (reference(lora_model, None)[n], 0)
    assert ask("a") == (of_wide, 0)
    assert ask("b") == (of_rs, 0)
    tokens, cached = ask("a")
    assert tokens == of_wide
    assert cached > 0
    load(engine, "a", adapters["narrow"])
    assert ask("a") == (of_narrow, 0)
    load(engine, "a", adapters["wide"])
    assert ask("a") == (of_wide, 0)


def test_a_request_that_names_an_unknown_adapter_is_refused_and_changes_nothing(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    with pytest.raises(RequestedAdapterMissing, match="adapter 'nobody' is not loaded"):
        engine.add(request("x", (5,), "nobody"))
    assert not engine.has_work
    with pytest.raises(AdapterNotLoaded):
        engine.remove_adapter("nobody")


def test_an_adapter_that_overflows_spoils_no_row_of_another_one(
    tmp_path: Path, make_engine: MakeEngine
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    engine = make_engine(folder)
    good = write_adapter(tmp_path / "good", folder, seed=1)
    load(engine, "good", good)
    weights = engine.read_adapter(write_adapter(tmp_path / "bad", folder, seed=2))
    for layer in weights.layers:
        for a, _ in layer.values():
            a.fill_(3e38)
    engine.install_adapter("bad", weights)
    requests = [request(f"{name} {n}", PROMPTS[n], name) for n in range(4) for name in ("good", "bad")]
    answers = run_to_end(engine, requests)
    expected = peft_greedy(folder, good, PROMPTS[:4], MAX_TOKENS)
    assert [answers[f"good {n}"].token_ids for n in range(4)] == expected
    bad = [answers[f"bad {n}"].last for n in range(4)]
    assert [one.error for one in bad if one is not None] == ["nan_output"] * 4


def random_weights(generator: torch.Generator, columns: list[int]) -> LoraWeights:
    """Random weights for two layers of a model in which every product has three inputs and three outputs."""

    def pair(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = torch.randint(-4, 5, (2, 1, count, 3), generator=generator).float()
        return a, b

    return LoraWeights(
        tuple({name: pair(n) for name, n in zip(PRODUCTS, columns, strict=True)} for _ in range(2))
    )


events = st.one_of(
    st.tuples(
        st.just("install"), st.sampled_from("abc"), st.lists(st.integers(0, 3), min_size=4, max_size=4)
    ),
    st.tuples(st.just("remove"), st.sampled_from("abc")),
    st.tuples(st.just("start"), st.sampled_from("abc")),
    st.tuples(st.just("end"), st.integers(0, 20)),
)


@settings(deadline=None, max_examples=25)
@given(st.lists(events, max_size=25), st.integers(0, 99))
def test_whatever_is_installed_and_removed_each_request_gets_the_version_it_began_with(
    history: list[tuple[object, ...]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    bank = AdapterBank(2, lambda folder: LoraWeights(()))
    named: dict[str, LoraWeights] = {}
    running: list[tuple[AdapterVersion | None, LoraWeights | None]] = [(None, None)]
    for kind, *what in history:
        if kind == "install":
            name, columns = str(what[0]), what[1]
            weights = random_weights(generator, columns)  # type: ignore[arg-type]
            try:
                bank.install(name, weights, {one[0] for one in running})
            except NoAdapterRoom:
                assert len(named.keys() | {name}) > 2 or len({one[0] for one in running} - {None}) > 1
            else:
                named[name] = weights
        elif kind == "remove":
            if named.pop(str(what[0]), None) is None:
                with pytest.raises(AdapterNotLoaded):
                    bank.remove(str(what[0]))
            else:
                bank.remove(str(what[0]))
        elif kind == "start" and what[0] in named:
            running.append((bank.version(str(what[0])), named[str(what[0])]))
        elif kind == "end" and len(running) > 1:
            del running[1 + int(str(what[0])) % (len(running) - 1)]
        bank.drop_unused({one[0] for one in running})
        assert bank.named.keys() == named.keys()
        assert bank.is_empty == (not named and len(running) == 1)

        owners, lengths = [one[0] for one in running], [1 + n % 3 for n in range(len(running))]
        batch = bank.batch(owners, lengths, torch.device("cpu"))
        x = torch.randint(-4, 5, (sum(lengths), 3), generator=generator).float()
        for layer in range(2):
            for name in PRODUCTS:
                rows = []
                for part, (_, own) in zip(x.split(lengths), running, strict=True):
                    a, b = own.layers[layer][name] if own else torch.zeros(2, 1, 1, 3)
                    rows.append(part @ a[0].T @ b[0])
                result = torch.zeros(len(x), 3)
                if batch is not None:
                    batch.add_to(result, x, layer, name)
                assert torch.equal(result, torch.cat(rows))
