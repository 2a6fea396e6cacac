"""sentence-transformers' losses under the shipped trainer: the gradient of the loss of all samples of the update."""

from typing import Any

import pytest
from torch import nn

from megabatch import PlanError
from tests.exact import oracle
from tests.exact.launch import of_ranks
from tests.integrations.sentences import ANCHORS, LOSSES, SIZE, losses, model_of, pairs, save_model, st, train

ON_TWO = ["MultipleNegativesRankingLoss/2", "CoSENTLoss/1", "several/2"]
results = of_ranks("tests.integrations.sentences:run_job", {2: ON_TWO})


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(str(tmp_path_factory.mktemp("bert")))


@pytest.mark.full
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tokens", [None, 64])
def test_an_update_has_the_gradient_of_all_its_samples_at_once(name, tokens, folder, tmp_path):
    from megabatch.integrations.sentence_transformers import MegabatchSentenceTransformerTrainer

    loss, data = LOSSES[name]
    number = len(data) if isinstance(data, dict) else 1
    expected = train(st.SentenceTransformerTrainer, folder, tmp_path, loss, data, SIZE, number)
    found = train(
        MegabatchSentenceTransformerTrainer, folder, tmp_path, loss, data, 2, SIZE * number // 2,
        max_microbatch_tokens=tokens,
    )  # fmt: skip
    reached = {name: gradient for name, gradient in expected.items() if gradient is not None}
    assert {name for name, gradient in found.items() if gradient is not None} == reached.keys()
    assert oracle.whole_error({name: found[name] for name in reached}, reached) <= 1e-12


@pytest.mark.full
def test_a_loss_that_is_no_function_of_embeddings_alone_is_refused(folder, tmp_path):
    from megabatch.integrations.sentence_transformers import MegabatchSentenceTransformerTrainer

    def classifier(model: Any) -> nn.Module:
        return losses.SoftmaxLoss(model, 16, num_labels=2)

    def guided(model: Any) -> nn.Module:
        return losses.GISTEmbedLoss(model, guide=model_of(folder))

    labelled = pairs(("premise", "hypothesis"), label=lambda draw: draw.randrange(2))
    for loss, data, cause in ((classifier, labelled, "parameters of its own"), (guided, ANCHORS, "has a guide")):
        with pytest.raises(PlanError, match=cause):
            train(MegabatchSentenceTransformerTrainer, folder, tmp_path, loss, data, 2, 4)


@pytest.mark.full
@pytest.mark.parametrize("job", ON_TWO)
def test_an_update_of_two_ranks_has_the_gradient_of_all_their_samples_at_once(results, job):
    assert max(results(job, 2)) <= 1e-12
