"""Parts of one's own: a rectified flow that draws digits. megabatch train recipes/flow-digits.toml

The model learns the velocity that carries noise to an image in a straight line; following it from noise draws digits.
Nothing in here is about text, tokens or megabatch but one line: the loss says that its weight is a number of samples.
"""

import numpy as np
import torch
from matplotlib import pyplot
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.utils.data import Dataset

import megabatch
from megabatch.train import Event

NUM_HELD_OUT = 297  # of scikit-learn's 1797 images


class Velocity(nn.Module):
    """A transformer over patches of 2 x 2 pixels, and two more tokens: the time and the digit to draw."""

    def __init__(self, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.to_patches = nn.Sequential(nn.PixelUnshuffle(2), nn.Flatten(2))
        self.patch = nn.Linear(4, width)
        self.place = nn.Parameter(torch.randn(16, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.digit = nn.Embedding(10, width)
        layer = nn.TransformerEncoderLayer(width, num_heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.velocity = nn.Linear(width, 4)

    def forward(self, image: Tensor, time: Tensor, digit: Tensor) -> Tensor:
        angles = time[:, None] * torch.pi * 2.0 ** torch.arange(8, device=time.device)  # [B, 8]
        told = torch.stack([self.time(torch.cat([angles.sin(), angles.cos()], 1)), self.digit(digit)], 1)  # [B, 2, D]
        patches = self.patch(self.to_patches(image).transpose(1, 2)) + self.place  # [B, 16, D]
        drawn = self.velocity(self.layers(torch.cat([patches, told], 1))[:, :16])  # [B, 16, 4]
        return nn.functional.pixel_shuffle(drawn.transpose(1, 2).unflatten(2, (4, 4)), 2)  # [B, 1, 8, 8]


class Draws(Dataset[dict[str, Tensor]]):
    """Each image many times, with noise and a time that belong to the sample: any cut of an update sees the same."""

    def __init__(self, images: Tensor, digits: Tensor, num_draws: int) -> None:
        self.images, self.digits, self.num_draws = images, digits, num_draws

    def __len__(self) -> int:
        return len(self.images) * self.num_draws

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        own = torch.Generator().manual_seed(index)
        image = self.images[index % len(self.images)]  # [1, 8, 8]
        noise, time = torch.randn(image.shape, generator=own), torch.randn((), generator=own).sigmoid()
        return {"image": image, "noise": noise, "time": time, "digit": self.digits[index % len(self.images)]}


def images_and_digits() -> tuple[Tensor, Tensor]:
    """Images [N, 1, 8, 8] in [-1, 1], and which digit each is [N]."""
    pixels, digits = load_digits(return_X_y=True)
    return torch.tensor(pixels / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(digits)


def data(num_draws: int) -> dict[str, Draws]:
    """Return the training set, and a held-out set of other images."""
    images, digits = images_and_digits()
    held_out = Draws(images[:NUM_HELD_OUT], digits[:NUM_HELD_OUT], 4)
    return {"train": Draws(images[NUM_HELD_OUT:], digits[NUM_HELD_OUT:], num_draws), "held-out": held_out}


@megabatch.loss(weigh=lambda microbatch: len(microbatch["image"]))
def loss(model: nn.Module, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Squared error of the velocity between noise and image, a mean over pixels, summed over samples."""
    image, noise, time = microbatch["image"], microbatch["noise"], microbatch["time"].view(-1, 1, 1, 1)
    velocity = model(noise + time * (image - noise), microbatch["time"], microbatch["digit"])
    return (velocity - (image - noise)).square().mean((1, 2, 3)).sum(), len(image)


@torch.no_grad()
def draw(model: nn.Module, digits: Tensor, num_steps: int) -> Tensor:
    """Digits from noise, by Euler steps along the velocity: [B, 1, 8, 8]."""
    image = torch.randn(len(digits), 1, 8, 8, generator=torch.Generator().manual_seed(0)).to(digits.device)
    for time in torch.arange(num_steps, device=digits.device) / num_steps:
        image = image + model(image, time.expand(len(digits)), digits) / num_steps
    return image.clamp(-1, 1)


def distance(some: np.ndarray, others: np.ndarray) -> float:
    """Fréchet distance between two sets of pictures [N, 64], each taken as a normal distribution."""
    covariances = np.cov(some.T), np.cov(others.T)
    roots = np.sqrt(np.linalg.eigvals(covariances[0] @ covariances[1]).real.clip(0))
    means = some.mean(0) - others.mean(0)
    return float(means @ means + np.trace(covariances[0] + covariances[1]) - 2 * roots.sum())


def evaluate(event: Event) -> dict[str, float]:
    """Draw digits and keep a picture; say which share a classifier reads as asked for, and how far from real ones."""
    asked = torch.arange(10, device=event.device).repeat(30)
    drawn = draw(event.model, asked, 50).cpu().flatten(1).numpy()  # [300, 64]
    if event.is_main:
        framed = np.pad(drawn[:100].reshape(10, 10, 8, 8), [(0, 0), (0, 0), (1, 1), (1, 1)], constant_values=-1)
        picture = framed.transpose(0, 2, 1, 3).reshape(100, 100).repeat(6, 0).repeat(6, 1)  # ten by ten digits
        pyplot.imsave(event.folder / f"samples-{event.step}.png", picture, cmap="gray")
    images, digits = images_and_digits()
    pixels = images.flatten(1).numpy()  # [N, 64]
    read = SVC().fit(pixels[NUM_HELD_OUT:], digits[NUM_HELD_OUT:].numpy()).predict(drawn)
    recognized = float((read == asked.cpu().numpy()).mean())
    return {"recognized": recognized, "distance": distance(drawn, pixels[:NUM_HELD_OUT])}
