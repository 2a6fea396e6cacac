"""Values that a loss may return; tests/test_errors.py has those that it may not."""

import pytest
import torch

from megabatch import Term, loss
from megabatch.core.contract import counted_weights, terms_of, weigh_of

TOTAL = torch.tensor(6.0, requires_grad=True) * 1
METRIC = torch.tensor(5.0)

RETURNED = {  # what the loss returned -> terms
    "a term": (Term(TOTAL, 2), {"loss": (6.0, 2.0)}),
    "a plain pair": ((TOTAL, 2), {"loss": (6.0, 2.0)}),
    "a list of two": ([TOTAL, 2.5], {"loss": (6.0, 2.5)}),
    "a tensor for a weight": ((TOTAL, torch.tensor(2)), {"loss": (6.0, 2.0)}),
    "tensors of one number": ((TOTAL.reshape(1, 1), torch.tensor([2.0])), {"loss": (6.0, 2.0)}),
    "a weight of nothing": ((TOTAL, 0), {"loss": (6.0, 0.0)}),
    "a weight that is true": ((TOTAL, True), {"loss": (6.0, 1.0)}),
    "a mapping": ({"lm": (TOTAL, 2), "accuracy": (METRIC, 4)}, {"lm": (6.0, 2.0), "accuracy": (5.0, 4.0)}),
}
COUNTED = [  # what weigh returned, weights
    (3, {"loss": 3.0}),
    (torch.tensor(3), {"loss": 3.0}),
    (torch.tensor([[3.5]]), {"loss": 3.5}),
    ({"lm": 3, "router": torch.tensor(1)}, {"lm": 3.0, "router": 1.0}),
    ({}, {}),
]


@pytest.mark.parametrize("name", RETURNED)
def test_returned(name):
    returned, expected = RETURNED[name]
    terms = terms_of(returned)
    assert {key: (float(total.detach()), float(weight)) for key, (total, weight) in terms.items()} == expected
    assert all(isinstance(term, Term) and term.total.shape == () for term in terms.values())


@pytest.mark.parametrize(("weight", "expected"), COUNTED)
def test_counted(weight, expected):
    assert counted_weights(weight) == expected


def test_a_loss_says_how_its_weight_is_counted():
    @loss(weigh=len)
    def counted(model, microbatch): ...

    def uncounted(model, microbatch): ...

    assert weigh_of(counted) is len
    assert weigh_of(uncounted) is None


def test_a_loss_that_counts_already_is_left_as_it_is():
    @loss(weigh=len)
    def counted(model, microbatch):
        return model, microbatch

    again = loss(weigh=sum)(counted)
    assert (weigh_of(counted), weigh_of(again)) == (len, sum)
    assert again("model", "microbatch") == ("model", "microbatch")
