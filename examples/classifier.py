"""A classifier of images through graphs: `python3 examples/classifier.py`.

Rows are images. Any batch of up to 16 is padded to the next captured size.
"""

import torch
from torch import nn

from graphrt import GraphRunner, InputSpec

model = nn.Sequential(
    nn.Conv2d(3, 16, 3, stride=2),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(256, 10),
).eval()

runner = GraphRunner(
    model,
    mode="FULL",
    sizes=[1, 2, 4, 8, 16],
    inputs={"input": InputSpec(torch.float32, ("rows", 3, 32, 32))},
    outputs=("rows", 10),
    platform="cpu",  # as the model
)
runner.capture()
for rows in (1, 3, 16, 20):
    images = torch.rand(rows, 3, 32, 32)
    scores = runner(input=images)
    assert torch.allclose(scores, model(images), atol=1e-5)
    print(rows, runner.last_dispatch.reason.name, scores.argmax(-1).tolist())
