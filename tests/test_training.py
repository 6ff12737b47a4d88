"""A small causal transformer trains on our attention as on PyTorch's."""

from __future__ import annotations

from collections.abc import Callable

import flashsmith as fs
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

STEPS, B, N, WIDTH, HEADS, WORDS = 20, 1, 32, 32, 2, 8
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Pre-norm causal self-attention and a feed-forward layer."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, WIDTH]; q, k and v are slices of one buffer, as they are in most models."""
        q, k, v = self.qkv(self.norms[0](x)).view(B, N, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).reshape(B, N, WIDTH))
        return x + self.down(torch.relu(self.up(self.norms[1](x))))


def train(attention: Attention) -> list[float]:
    """The losses of 20 steps: predict the word before, which only attention can see."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Layer(attention), Layer(attention), nn.Linear(WIDTH, WORDS))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    words, losses = torch.randint(WORDS, (B, N)), []
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(words)
        loss = cross_entropy(logits[:, 1:].float().flatten(0, 1), words[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("engine", ["torch", "emulator"])
def test_twenty_steps_have_the_losses_of_pytorchs_attention(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = train(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True))
    monkeypatch.setenv("FLASHSMITH_ENGINE", engine)
    got = train(lambda q, k, v: fs.attention(q, k, v, causal=True))
    assert max(abs(x - y) for x, y in zip(got, want, strict=True)) < 1e-2
    assert want[-1] < want[0] - 1
