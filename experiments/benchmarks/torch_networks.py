"""Networks as people write them in PyTorch. from_torch.py measures them, and tests/test_pytorch.py tests them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LeNet(nn.Module):
    """LeNet-5 for images [B, 1, 28, 28]. The network `fd.models.lenet5()` has the same shape."""

    def __init__(self, classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(x.size(0), -1)
        x = F.relu(self.fc1(x))
        x = self.dropout(F.relu(self.fc2(x)))
        return self.fc(x)


class Block(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y)


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


class ResNet(nn.Module):
    """ResNet-18 for small images, with any normalisation."""

    def __init__(self, norm: Callable[[int], nn.Module] = group_norm, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = norm(width)
        widths = [width * 2**stage for stage in range(4)]
        blocks = []
        for stage, (inputs, outputs) in enumerate(zip([width, *widths[:-1]], widths, strict=True)):
            blocks += [Block(inputs, outputs, 2 if stage else 1, norm), Block(outputs, outputs, 1, norm)]
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        x = self.blocks(x)
        x = F.adaptive_avg_pool2d(x, 1)
        return self.fc(torch.flatten(x, 1))


class Recurrent(nn.Module):
    """The characters of a text [B, length], an LSTM of two layers, and the next character."""

    def __init__(
        self, vocabulary: int = 80, width: int = 8, hidden: int = 32, kind: Any = nn.LSTM, **options: Any
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.rnn = kind(width, hidden, num_layers=2, batch_first=True, **options)
        self.fc = nn.Linear(hidden * (2 if options.get("bidirectional") else 1), vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.rnn(self.embedding(tokens))
        return self.fc(outputs[:, -1])


class ViT(nn.Module):
    """A vision transformer of `nn.TransformerEncoderLayer`, for images [B, 3, 32, 32]."""

    def __init__(
        self, width: int = 32, depth: int = 2, heads: int = 4, dropout: float = 0.0, classes: int = 10
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 65, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = self.norm(self.encoder(x + self.position))
        return self.head(x[:, 0])


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (
            part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in self.attention(x).split(C, 2)
        )
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.projection(y.transpose(1, 2).contiguous().view(B, T, C))


class Decoder(nn.Module):
    """A GPT-2: tokens [B, length] -> logits [B, length, vocabulary], with the table as the last layer."""

    def __init__(
        self,
        vocabulary: int = 100,
        length: int = 16,
        width: int = 32,
        depth: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            mlp = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width), nn.Dropout(dropout)
            )
            parts = {"norm1": nn.LayerNorm(width), "attention": Attention(width, heads, dropout)}
            self.blocks.append(nn.ModuleDict({**parts, "norm2": nn.LayerNorm(width), "mlp": mlp}))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, 0.0, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device)))
        for block in self.blocks:
            x = x + block["attention"](block["norm1"](x))
            x = x + block["mlp"](block["norm2"](x))
        return self.lm_head(self.norm(x))
