"""A program of the chief of a cluster whose other tasks are `mirror.distributed.Server`s."""

import numpy as np
import optax
from flax import nnx

import mirror


def loss_fn(model: nnx.Module, batch: dict) -> object:
    return optax.squared_error(model(batch["x"]), batch["y"])[:, 0]


def main() -> None:
    resolver = mirror.distributed.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        server = mirror.distributed.Server(resolver, num_cpus=1)
        print(server, flush=True)
        server.join()
        print(server, flush=True)
        return
    with mirror.ps.ParameterServerStrategy(resolver, staleness=0) as strategy:
        with strategy.scope():
            model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
            trainer = mirror.Trainer(model, optax.sgd(0.1), loss_fn)
        x = np.arange(12, dtype=np.float32).reshape(6, 2) / 10
        data = {"x": x, "y": x.sum(1, keepdims=True)}
        trainer.fit(data, epochs=20, batch_size=4, progress=False)
        print(strategy, flush=True)
        print("loss", trainer.evaluate(data, batch_size=4)["loss"], flush=True)


if __name__ == "__main__":
    main()
