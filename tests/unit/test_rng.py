"""What was drawn once can be drawn again, and what comes after is as if it had not been."""

import random

import pytest
import torch

from megabatch.engine import random_state

CPU = torch.device("cpu")


def test_a_replay_draws_the_same_again() -> None:
    state = random_state.note(CPU)
    first = torch.rand(5), torch.randn(3), torch.randperm(9)
    torch.rand(100)
    with random_state.replay(state):
        again = torch.rand(5), torch.randn(3), torch.randperm(9)
    assert all(map(torch.equal, first, again))


def test_afterwards_the_generator_goes_on_from_where_it_was() -> None:
    torch.manual_seed(1)
    torch.rand(7)
    expected = torch.rand(4)
    torch.manual_seed(1)
    state = random_state.note(CPU)
    torch.rand(7)
    with random_state.replay(state):
        torch.rand(3)
    assert torch.equal(torch.rand(4), expected)


def test_also_where_what_is_inside_fails() -> None:
    state = random_state.note(CPU)
    torch.rand(7)
    expected = random_state.note(CPU)
    with pytest.raises(RuntimeError), random_state.replay(state):
        torch.rand(3).view(2)
    assert random_state.note(CPU).same_as(expected)


def test_states_differ_where_something_was_drawn() -> None:
    state = random_state.note(CPU)
    assert random_state.note(CPU).same_as(state)
    torch.rand(1)
    assert not random_state.note(CPU).same_as(state)


def test_generators_that_are_not_torchs_are_left_alone() -> None:
    before = random.getstate()
    with random_state.replay(random_state.note(CPU)):
        pass
    assert random.getstate() == before
