"""The embedded engine's vectors are the mean of transformers' last hidden states, however work is split."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from engine.engine import Engine
from engine.errors import PromptTooLong
from engine.limits import check_request
from engine.values import GenerationRequest, SequenceEnd
from tests.engine.support import greedy, random_prompts, run_prompts, run_to_end, write_tiny_model

MakeEngine = Callable[..., Engine]
Floats = NDArray[np.float32]
PROMPTS = tuple(random_prompts(12, 512))
TOLERANCE = 2e-5


def embedding(name: str, prompt: tuple[int, ...], priority: int = 0) -> GenerationRequest:
    return GenerationRequest(name, prompt, greedy(1), priority=priority, embed=True)


def vectors(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> Floats:
    """Returns the embedding of each prompt; all requests run together."""
    answers = run_to_end(engine, [embedding(str(n), prompt) for n, prompt in enumerate(prompts)])
    found = []
    for n, prompt in enumerate(prompts):
        last = answers[str(n)].last
        assert last is not None and last.finish_reason is SequenceEnd.STOP
        assert (last.prompt_tokens, last.output_tokens, last.text) == (len(prompt), 0, "")
        found.append(np.frombuffer(last.embedding, dtype="<f4"))
    return np.stack(found)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Floats:
    model = AutoModel.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.inference_mode():
        means = [model(input_ids=torch.tensor([one])).last_hidden_state[0].mean(dim=0) for one in PROMPTS]
    return torch.nn.functional.normalize(torch.stack(means)).numpy()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="together"),
        pytest.param({"max_num_batched_tokens": 7}, id="in chunks of 7"),
        pytest.param({"enforce_eager": True}, id="without compiled loops"),
        pytest.param({"enable_prefix_caching": False, "max_num_seqs": 2}, id="two at a time"),
    ],
)
def test_a_vector_is_the_normalised_mean_of_the_last_hidden_states(
    make_engine: MakeEngine, reference: Floats, options: dict[str, object]
) -> None:
    found = vectors(make_engine(**options), PROMPTS)
    np.testing.assert_allclose(found, reference, atol=TOLERANCE)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=TOLERANCE)


def test_a_text_alone_has_the_vector_that_it_has_in_a_batch(make_engine: MakeEngine) -> None:
    engine = make_engine()
    alone = np.concatenate([vectors(engine, [one]) for one in PROMPTS])
    np.testing.assert_allclose(vectors(engine, PROMPTS), alone, atol=TOLERANCE)


def test_a_text_of_one_token_has_a_vector(make_engine: MakeEngine) -> None:
    assert np.linalg.norm(vectors(make_engine(), [(42,)])) == pytest.approx(1.0, abs=TOLERANCE)


def test_vectors_take_no_cached_prefix_and_leave_none(make_engine: MakeEngine, reference: Floats) -> None:
    engine = make_engine()
    longest = max(PROMPTS, key=len)
    run_prompts(engine, [longest], greedy(2))
    assert len(longest) > 2 * engine.info.block_size
    hits = engine.signals.prefix_hits
    np.testing.assert_allclose(
        vectors(engine, [longest])[0], reference[PROMPTS.index(longest)], atol=TOLERANCE
    )
    assert engine.signals.prefix_hits == hits
    other = tuple(reversed(longest))
    vectors(engine, [other])
    run_prompts(engine, [other], greedy(2))
    assert engine.signals.prefix_hits == hits


def test_embeddings_and_generation_in_the_same_steps_do_not_change_each_other(
    make_engine: MakeEngine, reference: Floats
) -> None:
    engine = make_engine(num_blocks=30, max_num_batched_tokens=48)
    said = run_prompts(make_engine(), PROMPTS, greedy(40, ignore_eos=True))
    chats = [GenerationRequest(f"c{n}", one, greedy(40, ignore_eos=True)) for n, one in enumerate(PROMPTS)]
    texts = [embedding(f"e{n}", one, priority=n % 2) for n, one in enumerate(PROMPTS)]
    mixed = [one for pair in zip(chats, texts, strict=True) for one in pair]
    answers = run_to_end(engine, mixed)
    assert engine.signals.preemptions
    assert [answers[f"c{n}"].token_ids for n in range(len(PROMPTS))] == said
    for n, expected in enumerate(reference):
        last = answers[f"e{n}"].last
        assert last is not None
        np.testing.assert_allclose(np.frombuffer(last.embedding, dtype="<f4"), expected, atol=TOLERANCE)


def test_a_text_may_fill_the_context_and_no_more(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=64)
    full = tuple(range(64))
    assert len(vectors(engine, [full])) == 1
    with pytest.raises(PromptTooLong, match="65 tokens; allowed: at most 64"):
        check_request(embedding("long", (*full, 1)), engine.info)


def test_embedding_requests_do_not_count_as_waiting_since_they_delay_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=1)
    for number in range(3):
        engine.add(embedding(str(number), PROMPTS[number]))
    engine.add(GenerationRequest("chat", PROMPTS[0], greedy(1)))
    assert engine.signals.waiting == 1
    engine.add(GenerationRequest("urgent", PROMPTS[1], greedy(1), priority=1))
    assert engine.signals.waiting == 2
    while engine.has_work:
        engine.step()


def test_an_aborted_text_leaves_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add(embedding("a", tuple(range(40))))
    assert engine.step() == []
    assert engine.abort("a")
    engine.check_integrity()
    assert engine.signals.kv_usage == 0


def test_a_text_with_a_token_that_overflows_in_the_last_layer_fails_alone(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    token, folder = 7, write_tiny_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    # The first dimension is zero but for this token, and the last layer's MLP reads it alone.
    weights["model.embed_tokens.weight"][:, 0] = torch.eye(512)[token] * 1e4
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name][0] = 0.0
        if name in ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"):
            weights[name].zero_()[0, 0] = 1.0
    weights["model.layers.1.mlp.down_proj.weight"][:, 0] = 3e38
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    requests = [embedding("bad", (5, token, 9)), embedding("good", (5, 8, 9))]
    answers = run_to_end(make_engine(folder), requests)
    last = [one.last for one in answers.values()]
    assert [one.error for one in last if one is not None] == ["nan_output", None]
