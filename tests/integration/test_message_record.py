"""The worker records messages of gloo on its page, however the script calls them."""

import json
import subprocess
import sys
from typing import Any

SCRIPT = """
import json, os, signal, sys
import torch
import torch.distributed as dist
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage, create_page
from ftrun.worker.process import message_record

rank = 1 if os.fork() == 0 else 0
signal.alarm(100)
page = SharedPage(create_page("test"))
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
message_record.install(page)
message_record.install(page)
other, data, found = 1 - rank, torch.arange(4.0), torch.zeros(4)
pair = dist.new_group([0, 1])
for turn in range(3):
    if rank:
        dist.send(data, 0, tag=turn)
        dist.send(data * 2, 0)
    else:
        dist.recv(found, 1, tag=turn)
        assert dist.recv(found) == 1 and found.equal(data * 2)
operations = [
    dist.P2POp(dist.isend, data, other, pair), dist.P2POp(dist.irecv, found, other, pair)
]
for work in dist.batch_isend_irecv(operations):
    work.wait()
assert found.equal(data)
open_work = dist.isend(data, other) if rank else None
dist.barrier()
shown = [(one.is_send, one.peer, one.tag, one.count, bool(one.ended_ns)) for one in page.messages()]
line = json.dumps([rank, shown, message_record.calls_of_default_group()])
print(line + "\\n", end="", flush=True)
if rank:
    waited = page.get(HeartbeatField.WAITED_NS)
    assert waited > 0 and page.get(HeartbeatField.MESSAGE_WAITED) == 0
    totals = [one.total_ns for one in page.messages() if one.ended_ns]
    assert totals == sorted(totals) and totals[-1] <= waited
    # A bug in the recorder ends the recording, not the call.
    message_record._recorder._counts = None
    dist.send(data, 0)
    assert len(page.messages()) == len(shown)
else:
    dist.recv(found, 1)
    dist.recv(found, 1)
dist.barrier()
dist.destroy_process_group()
other_store = dist.PrefixStore("again", store)
dist.init_process_group("gloo", store=other_store, rank=rank, world_size=2)
assert message_record.calls_of_default_group() == 0
if not rank:
    dist.send(data, 1)
    assert message_record.calls_of_default_group() == 1
else:
    dist.recv(found, 0)
dist.barrier()
if rank:
    os._exit(0)
os.wait()
"""


def test_every_form_of_a_message_is_recorded(tmp_path: Any) -> None:
    words = [sys.executable, "-c", SCRIPT, str(tmp_path / "store")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    found = {rank: (shown, count) for rank, shown, count in lines}
    sent = [[True, 0, 0, 1, True], [True, 0, 0, 2, True]]
    sent += [[True, 0, 1, 1, True], [True, 0, 0, 3, True], [True, 0, 2, 1, True]]
    sent += [[True, 0, 0, 4, True]]
    own_group = [[True, 0, 0, 1, True], [False, 0, 0, 1, True]]
    assert found[1] == ([*sent, *own_group, [True, 0, 0, 5, False]], 7)
    received = [[False, 1, 0, 1, True], [False, -1, 0, 1, True], [False, 1, 1, 1, True]]
    received += [[False, -1, 0, 2, True], [False, 1, 2, 1, True], [False, -1, 0, 3, True]]
    assert found[0] == ([*received, [True, 1, 0, 1, True], [False, 1, 0, 1, True]], 6)
    assert "messages are not recorded any more" in done.stderr
