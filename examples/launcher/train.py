"""A trainer of a few compiled steps."""

import torch
from torch import nn

torch.manual_seed(0)
model, batch = nn.Linear(8, 8), torch.randn(4, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model, backend="eager")
for step in range(3):
    loss = (compiled(batch) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
