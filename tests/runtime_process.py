"""A process for test_runtime: set-up, MindFormers, and a few graphs in the order that the arguments name.

Prints one JSON object: results by graph, compilation counts, statistics of the compile cache.
"""

import json
import sys

from dancegrpo.runtime.setup import setup_runtime

runtime = setup_runtime(compile_cache=sys.argv[2] == "cache", cache_key="test")

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
from mindspore import nn  # noqa: E402

from dancegrpo.runtime import compile_cache, probes  # noqa: E402


class Stray(nn.Cell):
    """A user's Cell; its Parameter is not registered."""

    def __init__(self, parameter: ms.Parameter) -> None:
        super().__init__()
        self.hidden = [parameter]

    def construct(self, x):
        return (self.hidden[0] * x).sum()


@ms.jit
def double(x):
    return 2 * x.sum()


values = np.linspace(-1, 2, 16, dtype=np.float32).reshape(4, 4)
net = nn.SequentialCell(nn.Dense(4, 4, weight_init=ms.Tensor(values), bias_init="zeros"), nn.Sigmoid())
loss = nn.WithLossCell(net, nn.MSELoss())
gradient = nn.ForwardValueAndGrad(loss, weights=net.trainable_params(), get_by_list=True)
graphs = {
    "net": net,
    "loss": lambda x: loss(x, 0 * x),
    "gradient": lambda x: gradient(x, 0 * x)[1][0],
    "function": double,
    "stray": Stray(net.trainable_params()[0]),
}
results, counts = {}, [probes.compilations()]
for name in sys.argv[1].split(","):
    graph, _, rows = name.partition(":")
    results[name] = float(graphs[graph](ms.Tensor(np.ones((int(rows), 4), np.float32))).asnumpy().sum())
    counts.append(probes.compilations())
if "mindformers" in sys.argv:
    from mindformers import AdamW

    AdamW(net.trainable_params(), 1e-3)
graph_mode = ms.get_context("mode") == ms.GRAPH_MODE
print(
    json.dumps({"results": results, "counts": counts, "graph_mode": graph_mode, **compile_cache.statistics()})
)
