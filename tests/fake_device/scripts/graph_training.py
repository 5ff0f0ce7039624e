"""Adds 1 to each parameter per step on the fake device, from step 8 on by the replay of a graph.

Arguments: a file for the result, and what the graph contains: `update` (no optimizer takes part) or
`step` (the step of the optimizer). It kills itself once after step 40; its next process compares.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from fake_device import fake
from fake_device.conformance import new_graph
from torch import nn

import ftrun

DEVICE = "fake:0"
GRAPH_FROM = 8
KILL_AFTER = 40


def main() -> None:
    fake.load()
    torch.set_num_threads(1)
    result, what = Path(sys.argv[1]), sys.argv[2]
    model = nn.ParameterList([nn.Parameter(torch.ones(1 << 18)) for _ in range(8)]).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for one in model.parameters():
        one.grad = torch.full_like(one, -1.0)
    stream = torch.Stream(DEVICE)
    torch.accelerator.synchronize(0)
    with stream:
        session = ftrun.attach(model=model, optimizer=optimizer)
        if session.restored:
            torch.accelerator.synchronize(0)
            found = [sorted(set(one.detach().cpu().tolist())) for one in model.parameters()]
            result.write_text(json.dumps({"step": session.step, "found": found}))
            os._exit(0)
        graph = new_graph(DEVICE)
        parameters = [one.detach() for one in model.parameters()]
        for step in session.steps(60):
            if step == GRAPH_FROM:
                graph.capture_begin()
                if what == "step":
                    optimizer.step()
                else:
                    torch._foreach_add_(parameters, 1.0)
                graph.capture_end()
            if step < GRAPH_FROM:
                optimizer.step()
            else:
                graph.replay()
            stream.synchronize()
            if step == KILL_AFTER:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
