"""The model that comes with the project. Delete this file when you edit ToyModel."""

import torch

from model import ToyModel


def test_the_toy_model_is_that_of_the_tutorial() -> None:
    model = ToyModel()
    weights = sum(weight.numel() for weight in model.parameters())
    assert weights == 62_006, "you have edited ToyModel: delete tests/test_toy_model.py"
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
