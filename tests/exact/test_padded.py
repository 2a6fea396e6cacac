"""Every family of transformers beside padding: a microbatch of unequal samples is exact, or it is refused."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from megabatch import PlanError
from megabatch.batching.padding import Padding
from megabatch.inspection.mixing_causes import find_mixing_causes
from tests.exact import padded
from tests.tiers import full_unless

pytestmark = pytest.mark.slow

QUICK = (
    "CausalLM gpt2", "MaskedLM bert", "TokenClassification deberta-v2", "AudioClassification wav2vec2-bert",  # exact
    "MaskedLM fnet", "MaskedLM big_bird", "SequenceClassification xlnet", "SequenceClassification t5gemma",
    "CTC wav2vec2", "SpeechSeq2Seq speech_to_text",
)  # fmt: skip
NOT_BUILT = {case for cases in padded.NOT_BUILT.values() for case in cases}
ROPE = {"rope_theta": 10000.0, "factor": 2.0}
LONG = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize("case", full_unless(padded.CASES, lambda _, case: case in QUICK))
def test_padding_is_exact_or_refused(case: str) -> None:
    found = padded.outcome(case)
    if case in NOT_BUILT:
        assert found.startswith("not built"), f"{case} can be built now: take it out of NOT_BUILT"
    else:
        assert found == ("refused" if case in padded.REFUSED else "exact")


def test_each_case_is_one_of_transformers() -> None:
    assert NOT_BUILT | padded.REFUSED | set(QUICK) <= set(padded.CASES)
    assert not NOT_BUILT & padded.REFUSED


@pytest.mark.parametrize(
    ("expected", "case", "config"),
    [
        ("exact", "MaskedLM big_bird", {"block_size": 16}),  # no sample is long enough for blocks
        ("exact", "CTC wav2vec2", {"feat_extract_norm": "layer"}),
        ("exact", "SequenceClassification xlnet", {"summary_type": "first"}),
        ("exact", "CausalLM llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic"}}),
        (
            "refused", "CausalLM llama",
            {"rope_parameters": {**ROPE, "rope_type": "dynamic"}, "max_position_embeddings": 12},
        ),
        (
            "refused", "CausalLM phi3",
            {"rope_parameters": {**ROPE, **LONG, "rope_type": "longrope"}, "original_max_position_embeddings": 12},
        ),
    ],
)  # fmt: skip
def test_a_config_may_decide(expected: str, case: str, config: dict[str, object]) -> None:
    assert padded.outcome(case, **config) == expected


def test_a_class_that_a_wrapper_has_renamed_is_refused(group_of_one: None) -> None:
    model = padded.make("SequenceClassification t5gemma")
    (cause,) = [cause for cause, _ in find_mixing_causes(model)]
    fully_shard(model)
    assert type(model).__name__ == "FSDPT5GemmaForSequenceClassification"
    assert [cause for cause, _ in find_mixing_causes(model)] == [cause]


def test_labels_of_unequal_lengths_are_refused_where_they_become_inputs() -> None:
    ids = torch.ones(5, dtype=torch.long)
    samples = [{"input_ids": ids, "labels": torch.ones(length, dtype=torch.long)} for length in (3, 4)]
    with pytest.raises(PlanError, match="have labels of unequal lengths, and prophetnet takes"):
        Padding([padded.make("Seq2SeqLM prophetnet")])(samples)
    assert Padding([padded.make("Seq2SeqLM t5")])(samples)["labels"].shape == (2, 4)
