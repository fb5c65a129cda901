"""The gradient of a batch: against a reference of its own, packed or not, in every split into micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from worlds.training_batches import AGENT, training_batch

from heddle_dask import BadInput
from heddle_dask.training.advantages import less_mean_over_std
from heddle_dask.training.groups import TrainingBatch
from heddle_dask.training.trainer_spec import TrainerSpec
from pipelines.grpo.batch_step import BatchStep
from pipelines.grpo.losses import LossInputs, decoupled_clipped_loss, loss_function, token_weights
from pipelines.grpo.policy import Policy
from pipelines.grpo.sequences import TrainedSequence, micro_batches, parts_of, shares_of, trained_sequences
from pipelines.grpo.step_metrics import learning_rate

CPU = torch.device("cpu")
SPEC = TrainerSpec(str(AGENT), "unused", "a", max_grad_norm=1e9)


class Recorder(torch.optim.SGD):
    """Changes nothing, and keeps the gradient of each step."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.trained, lr=0.0)
        self.gradients: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        """Keep the gradient."""
        weights = self.param_groups[0]["params"]
        self.gradients.append(torch.cat([weight.grad.flatten() for weight in weights]))


@pytest.fixture(scope="module")
def packing() -> Policy:
    torch.set_num_threads(1)
    return Policy(SPEC, CPU)


@pytest.fixture(scope="module")
def padding() -> Policy:
    return Policy(replace(SPEC, packed=False), CPU)


def gradient(policy: Policy, batch: TrainingBatch, **changed: Any) -> torch.Tensor:
    """Of the only optimiser step of a batch."""
    whole = policy.spec
    policy.spec = replace(whole, **changed)
    recorder = Recorder(policy)
    step = BatchStep(policy, recorder, decoupled_clipped_loss, None, 0, 0)
    step.run(sequences_of(batch))
    policy.spec = whole
    (found,) = recorder.gradients
    return found


def sequences_of(batch: TrainingBatch) -> list[TrainedSequence]:
    return trained_sequences(batch, less_mean_over_std, 320, 4096)


def reference_gradient(batch: TrainingBatch) -> torch.Tensor:
    """Equation by equation, one sequence at a time, with a loss over all tokens; knows nothing of pipelines.grpo."""
    model = AutoModelForCausalLM.from_pretrained(AGENT, dtype=torch.float32, attn_implementation="eager")
    count = sum(int(s.trained.sum()) for g in batch.groups for m in g.members for s in m.sequences)
    for group in batch.groups:
        rewards = np.array([member.reward for member in group.members])
        for member in group.members:
            advantage = (member.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            for sequence in member.sequences:
                ids = torch.tensor(sequence.token_ids.astype(np.int64))
                logits = model(input_ids=ids[None]).logits[0]
                loss = torch.zeros(())
                for at in np.flatnonzero(sequence.trained):
                    scaled = logits[at - 1] / float(sequence.temperatures[at])
                    logprob = scaled[ids[at]] - torch.logsumexp(scaled, 0)
                    weight = min(float(torch.exp(logprob.detach() - float(sequence.logprobs[at]))), 2.0)
                    ratio = torch.exp(logprob - logprob.detach())
                    loss = loss - weight * ratio * advantage
                (loss / count).backward()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.cat([weight.grad.flatten() for weight in weights])


def test_the_gradient_of_one_step_is_that_of_a_plain_reference(packing: Policy, padding: Policy) -> None:
    batch = training_batch(1, [[12, 30, 9], [17, 8, 25]])
    expected = reference_gradient(batch)
    assert expected.norm() > 1e-3
    torch.testing.assert_close(gradient(packing, batch), expected, rtol=2e-4, atol=2e-6)
    torch.testing.assert_close(gradient(padding, batch), expected, rtol=2e-4, atol=2e-6)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.lists(st.integers(4, 40), min_size=2, max_size=4), min_size=1, max_size=3),
    st.integers(1, 120),
    st.sampled_from(["batch", "sequence", "constant"]),
)
def test_every_split_gives_the_same_gradient_packed_or_not(
    packing: Policy, padding: Policy, lengths: list[list[int]], most_tokens: int, normalisation: str
) -> None:
    batch = training_batch(1, lengths, seed=3)
    expected = gradient(padding, batch, micro_batch_tokens=1 << 20, normalisation=normalisation)
    for policy in (packing, padding):
        found = gradient(policy, batch, micro_batch_tokens=most_tokens, normalisation=normalisation)
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-6)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=20),
    st.integers(1, 100),
    st.integers(1, 3),
    st.booleans(),
)
def test_each_sequence_is_in_one_micro_batch_of_one_rank(
    lengths: list[int], most_tokens: int, ranks: int, packed: bool
) -> None:
    sequences = [_sequence(number, length) for number, length in enumerate(lengths)]
    shares = shares_of(sequences, ranks)
    split = [micro for share in shares for micro in micro_batches(share, most_tokens, packed=packed)]
    assert sorted(one.number for micro in split for one in micro) == list(range(len(lengths)))
    for micro in split:
        tokens = [one.length for one in micro]
        taken = sum(tokens) if packed else max(tokens) * len(tokens)
        assert taken <= most_tokens or len(micro) == 1
    loads = [sum(one.length for one in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 4))
def test_parts_keep_trajectories_whole(lengths: list[int], parts: int) -> None:
    sequences = [replace(_sequence(number, length), trajectory=number // 2) for number, length in enumerate(lengths)]
    split = parts_of(sequences, parts, "seed")
    assert sorted(one.number for part in split for one in part) == list(range(len(lengths)))
    owners = [{one.trajectory for one in part} for part in split]
    assert sum(map(len, owners)) == len(set.union(*owners))
    assert [[one.number for one in part] for part in parts_of(sequences, parts, "seed")] == [
        [one.number for one in part] for part in split
    ]


def test_tokens_whose_ratio_is_out_of_range_have_no_gradient(packing: Policy) -> None:
    """Masked importance sampling: the same gradient as where their advantage is 0."""
    whole = sequences_of(training_batch(1, [[12, 30, 9], [17, 8, 25]]))
    known = BatchStep(packing, Recorder(packing), decoupled_clipped_loss, None, 0, 0)._known(
        [[one] for one in whole], packing.model
    )
    far = {one.number: np.arange(len(one.targets)) % 2 == 0 for one in whole}
    given = [
        replace(one, logprobs=known[one.number].numpy() + np.where(far[one.number], np.float32(2), np.float32(0.1)))
        for one in whole
    ]
    without = [replace(one, advantages=np.where(far[one.number], np.float32(0), one.advantages)) for one in given]
    spec, found = packing.spec, []
    for limit, sequences in ((2.0, given), (0.0, without)):
        packing.spec, recorder = replace(spec, ratio_limit=limit), Recorder(packing)
        metrics, _ = BatchStep(packing, recorder, decoupled_clipped_loss, None, 0, 0).run(sequences)
        packing.spec = spec
        found.append(recorder.gradients[0])
        if limit:
            assert metrics["masked_share"] == np.concatenate([*far.values()]).mean()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)


def test_a_masked_member_is_not_trained_on() -> None:
    batch = training_batch(1, [[12, 30, 9]])
    (group,) = batch.groups
    masked = replace(group, members=(replace(group.members[0], masked=True), *group.members[1:]))
    kept = sequences_of(replace(batch, groups=(masked,)))
    assert [(one.trajectory, one.advantages.tolist()) for one in kept] == [
        (one.trajectory, one.advantages.tolist()) for one in sequences_of(batch) if one.trajectory
    ]


def _sequence(number: int, length: int) -> TrainedSequence:
    plain = np.zeros(1, np.float32)
    ids = np.zeros(length + 1, np.int64)
    return TrainedSequence(number, number, ids, np.array([length]), plain, plain, plain + 1, plain.astype(np.int32))


def test_several_steps_clip_around_the_policy_before_the_batch(packing: Policy) -> None:
    policy = Policy(replace(SPEC, parts=2, passes=3, clip_low=0.0, clip_high=0.0), CPU)
    optimizer = torch.optim.AdamW(policy.trained, lr=1e-3)
    step = BatchStep(policy, optimizer, decoupled_clipped_loss, None, 0, 0)
    metrics, _ = step.run(sequences_of(training_batch(1, [[12, 30, 9], [17, 8, 25]])))
    # Half of the tokens go the way of their advantage at each step, and there nothing more is gained.
    assert 0.2 < metrics["clip_fraction"] < 1
    one_step = BatchStep(packing, Recorder(packing), decoupled_clipped_loss, None, 0, 0)
    metrics_of_one, _ = one_step.run(sequences_of(training_batch(1, [[12, 30], [17, 8]])))
    assert "clip_fraction" not in metrics_of_one
    assert metrics["tokens"] == sum(len(s.targets) for s in sequences_of(training_batch(1, [[12, 30, 9], [17, 8, 25]])))


def test_the_loss_is_that_of_its_formula() -> None:
    spec = replace(SPEC, clip_low=0.1, clip_high=0.3, importance_cap=1.5, kl_coefficient=0.5)
    rng = np.random.default_rng(1)
    logprobs, prox, behaviour, reference, advantages = rng.normal(0, 0.5, (5, 200))
    inputs = LossInputs(*(torch.tensor(each) for each in (logprobs, prox, behaviour, reference, advantages)))
    ratio, weight = np.exp(logprobs - prox), np.minimum(np.exp(prox - behaviour), 1.5)
    expected = -weight * np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.3) * advantages)
    expected += 0.5 * (np.exp(reference - logprobs) - (reference - logprobs) - 1)
    np.testing.assert_allclose(decoupled_clipped_loss(inputs, spec).numpy(), expected)


def test_weights_of_tokens() -> None:
    assert token_weights([3, 1], SPEC) == [0.25, 0.25]
    assert token_weights([3, 0, 1], replace(SPEC, normalisation="sequence")) == [1 / 6, 0.0, 0.5]
    assert token_weights([3, 1], replace(SPEC, normalisation="constant", constant_tokens=10)) == [
        1 / 20,
        1 / 20,
    ]


def test_learning_rates() -> None:
    spec = replace(SPEC, learning_rate=1.0, warmup_steps=3, schedule="linear", schedule_steps=7)
    rates = [learning_rate(spec, number) for number in range(1, 10)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    cosine = replace(spec, schedule="cosine")
    assert learning_rate(cosine, 6) == pytest.approx(0.5)
    assert learning_rate(replace(spec, schedule="constant"), 99) == 1.0


def scaled_loss(inputs: LossInputs, spec: TrainerSpec) -> torch.Tensor:
    return -3 * inputs.logprobs * inputs.advantages


def short_loss(inputs: LossInputs, spec: TrainerSpec) -> torch.Tensor:
    return inputs.logprobs[:1]


def test_a_loss_of_the_user_replaces_ours(packing: Policy) -> None:
    name = f"{__name__}:scaled_loss"
    recorder = Recorder(packing)
    batch = sequences_of(training_batch(1, [[12, 30], [17, 8]]))
    BatchStep(packing, recorder, loss_function(name), None, 0, 0).run(batch)
    assert recorder.gradients[0].norm() > 0
    with pytest.raises(BadInput, match="give one number for each of"):
        BatchStep(packing, recorder, loss_function(f"{__name__}:short_loss"), None, 0, 0).run(batch)
    with pytest.raises(BadInput, match="use package"):
        loss_function(f"{__name__}:no_such")


def broken(change: str) -> TrainingBatch:
    batch = training_batch(1, [[12, 30]])
    (group,) = batch.groups
    member = group.members[0]
    (sequence,) = member.sequences
    at = int(np.flatnonzero(sequence.trained)[0])
    if change == "logprob":
        sequence.logprobs[at] = np.nan
    elif change == "temperature":
        sequence.temperatures[at] = 0.0
    elif change == "tokenizer":
        sequence.token_ids[0] = 320
    elif change == "first":
        sequence.trained[0] = True
    else:
        for each in group.members:
            each.sequences[0].trained[:] = False
    return batch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("logprob", "sampled tokens without a logprob"),
        ("temperature", "without a temperature above 0"),
        ("tokenizer", "another tokenizer"),
        ("first", "begins with a sampled token"),
        ("nothing", "no sampled token"),
    ],
)
def test_batches_that_cannot_be_trained_are_refused(change: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as refused:
        sequences_of(broken(change))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"importance_cap": float("nan")}, "importance_cap"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"parts": 0}, "parts is 0"),
        ({"normalisation": "token"}, "use batch, sequence, constant"),
        ({"loss": "mine"}, "package.module:function"),
        ({"lineage": ""}, "lineage"),
    ],
)
def test_descriptions_that_cannot_be(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        replace(SPEC, **changed)


def test_a_description_survives_json() -> None:
    assert TrainerSpec.from_mapping(SPEC.to_mapping()) == SPEC
    with pytest.raises(BadInput, match="unknown key 'rate'"):
        TrainerSpec.from_mapping({**SPEC.to_mapping(), "rate": 1})
    with pytest.raises(BadInput, match="lacks checkpoints, lineage"):
        TrainerSpec.from_mapping({"model": "m"})
