"""torch's `DistributedDataParallel`: one process per replica, gloo, threads as set by torchrun.

This process is rank 0. It starts the other ranks, and sends them the number of steps of every turn.
A single replica is not wrapped, which is faster because there is nothing to reduce.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch import distributed, nn

from benchmarks import plan, workloads
from benchmarks.contender import Contender
from benchmarks.workloads import LEARNING_RATE, RESIDUAL, Conv, Workload

_HOST = "127.0.0.1"


class Residual(nn.Module):
    """`x + 0.1 * tanh(x @ w)`."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output."""
        return x + RESIDUAL * torch.tanh(x @ self.weight)


def net_of(workload: Workload) -> nn.Module:
    """Returns the model with the workload's initial parameters."""
    return nn.Sequential(*_LAYERS[workload.kind](workload))


def _mlp(workload: Workload) -> list[nn.Module]:
    return _dense(list(workload.initial_params()["layers"].values()))


def _dense(layers: Sequence[workloads.Params]) -> list[nn.Module]:
    dense = [_linear(layer) for layer in layers]
    return [*(part for layer in dense[:-1] for part in (layer, nn.ReLU())), dense[-1]]


def _cnn(workload: Workload) -> list[nn.Module]:
    params = workload.initial_params()
    parts: list[nn.Module] = []
    for conv, layer in zip(workload.convs, params["convs"].values(), strict=True):
        parts += _conv(conv, layer)
        parts += [nn.ReLU(), *([nn.MaxPool2d(2)] if conv.is_pooled else [])]
    first, *others = params["layers"].values()
    if workload.is_averaged:
        return [*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *_dense([first, *others])]
    # torch flattens channels first, so the rows of the next kernel are in a different order.
    side, channels = workload.last_side, workload.convs[-1].features
    kernel = first["kernel"].reshape(side, side, channels, -1)
    kernel = kernel.transpose(2, 0, 1, 3).reshape(side * side * channels, -1)
    return [*parts, nn.Flatten(), *_dense([{**first, "kernel": kernel}, *others])]


def _chain(workload: Workload) -> list[nn.Module]:
    weights = workload.initial_params()["weights"].values()
    return [Residual(torch.from_numpy(weight)) for weight in weights]


def _linear(params: workloads.Params) -> nn.Linear:
    layer = nn.Linear(*params["kernel"].shape)
    _set(layer, params["kernel"].T, params["bias"])
    return layer


def _conv(conv: Conv, params: workloads.Params) -> list[nn.Module]:
    kernel = params["kernel"].transpose(3, 2, 0, 1)  # from height, width, in, out
    is_strided = conv.stride > 1
    layer = nn.Conv2d(
        conv.inputs,
        conv.features,
        conv.size,
        conv.stride,
        padding=0 if is_strided else conv.padding.lower(),
        groups=conv.groups,
    )
    _set(layer, kernel, params["bias"])
    return [nn.ZeroPad2d((0, 1, 0, 1)), layer] if is_strided else [layer]


def _set(layer: nn.Linear | nn.Conv2d, kernel: np.ndarray, bias: np.ndarray) -> None:
    layer.load_state_dict(
        {"weight": torch.from_numpy(kernel.copy()), "bias": torch.from_numpy(bias)}
    )


_LAYERS = {"mlp": _mlp, "cnn": _cnn, "chain": _chain}


class Replica:
    """Model, optimizer and shard of the batch of one rank."""

    def __init__(self, workload: Workload, rank: int, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        net = net_of(workload)
        self._net = nn.parallel.DistributedDataParallel(net) if num_replicas > 1 else net
        self._adam = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE, eps=workload.epsilon)
        rows = workload.batch_size // num_replicas
        shard = slice(rank * rows, (rank + 1) * rows)
        batch = workload.batch()
        image = torch.from_numpy(batch["image"][shard].copy())
        self._image = image.permute(0, 3, 1, 2).contiguous() if image.ndim == 4 else image
        self._label = torch.from_numpy(batch["label"][shard].copy()).long()
        self._loss = torch.tensor(float("nan"))

    def advance(self, steps: int) -> None:
        """Takes some steps; all ranks wait for each other at the end."""
        for _ in range(steps):
            self._adam.zero_grad()
            loss = nn.functional.cross_entropy(self._net(self._image), self._label)
            loss.backward()
            self._adam.step()
            self._loss = loss.detach()
        if self._num_replicas > 1:
            distributed.all_reduce(self._loss)

    def loss(self) -> float:
        """Returns the mean of the last losses of all ranks."""
        return float(self._loss) / self._num_replicas


class TorchContender(Contender):
    """Rank 0, which sends the number of steps to the other ranks; 0 ends them."""

    def __init__(self, workload: Workload, num_replicas: int) -> None:
        self.name = plan.TORCH
        self._others: list[subprocess.Popen[bytes]] = []
        if num_replicas > 1:
            store = distributed.TCPStore(_HOST, 0, None, is_master=True, wait_for_workers=False)
            ranks = {"workload": asdict(workload), "ranks": num_replicas, "port": store.port}
            for rank in range(1, num_replicas):
                text = json.dumps({**ranks, "rank": rank})
                self._others.append(subprocess.Popen([sys.executable, "-m", __name__, text]))
            _join(store, 0, num_replicas)
        self._replica = Replica(workload, 0, num_replicas)

    def advance(self, steps: int) -> None:
        """Takes some steps on all ranks."""
        self._send(steps)
        self._replica.advance(steps)

    def loss(self) -> float:
        """Returns the mean of the last losses of all ranks."""
        return self._replica.loss()

    def close(self) -> None:
        """Ends the other ranks."""
        self._send(0)
        for process in self._others:
            process.wait()

    def _send(self, steps: int) -> None:
        if self._others:
            distributed.broadcast(torch.tensor(steps), 0)


def _join(store: distributed.Store, rank: int, num_replicas: int) -> None:
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_replicas)


def follow(text: str) -> None:
    """Runs one of the other ranks, which takes the same steps as rank 0."""
    request = json.loads(text)
    fields = request["workload"]
    workload = Workload(**{**fields, "convs": [Conv(**conv) for conv in fields["convs"]]})
    _join(distributed.TCPStore(_HOST, request["port"]), request["rank"], request["ranks"])
    replica = Replica(workload, request["rank"], request["ranks"])
    steps = torch.tensor(0)
    while distributed.broadcast(steps, 0) is None and int(steps):
        replica.advance(int(steps))


def create(name: str, workload: Workload, num_devices: int) -> TorchContender:
    """Returns the contender."""
    assert name == plan.TORCH
    return TorchContender(workload, num_devices)


if __name__ == "__main__":
    follow(sys.argv[1])
