"""Images, or anything else: a batch of tensors is cut by rows. python examples/images.py"""

import torch
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

from megabatch import GradientAccumulator, losses

torch.manual_seed(0)
config = ViTConfig(
    image_size=8, patch_size=2, num_channels=1, num_labels=10, hidden_size=64, intermediate_size=128,
    num_hidden_layers=2, num_attention_heads=4,
)  # fmt: skip
model = ViTForImageClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
pixels, digits = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(digits)
gradient = GradientAccumulator(model, micro_batch_size=16)  # of the 64 that the optimizer sees
for _ in range(4):
    for rows in torch.randperm(1500).split(64):
        batch = {"pixel_values": images[rows], "labels": labels[rows]}
        gradient.forward_backward(batch, losses.classification)
        update = gradient.finalize(max_norm=1.0)
        if update.finite:
            optimizer.step()
    with torch.no_grad():
        right = model(images[1500:]).logits.argmax(1) == labels[1500:]
    print(f"loss {update.loss:.3f}  {right.float().mean():.1%} of held-out digits right")
