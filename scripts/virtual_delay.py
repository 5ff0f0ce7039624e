"""A part of a cable with a delay, and with losses: two TAP devices and a process between them.

Runs in:  the network namespace of a switch, as `virtual_delay.py NEAR FAR MS LOSS owned|kept`.
Takes in: names for the two devices, milliseconds in each direction, percent of frames lost.
Gives:    its pid and, after a line on stdin, `ready`: then the two devices exist, and frames
          pass from one to the other. An owned one ends at the end of its stdin.

The kernel's own netem is often not built in. Frames of up to 64 KiB cross whole (the kernel splits
them at the far end, or never), so one process carries some hundred megabytes a second. Such a frame
is lost as a whole.
"""

import collections
import contextlib
import fcntl
import os
import random
import select
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_TAP = 0x0002
_NO_PACKET_INFO = 0x1000
_WITH_OFFLOAD_HEADER = 0x4000
_CHECKSUM_AND_TCP_SEGMENTS = 1 | 2 | 4
_FRAME_BYTES = 70000
_MAX_QUEUED_BYTES = 64 << 20
"""In one direction; more is dropped, as in a full switch."""
_FRAMES_AT_ONCE = 64


class Direction:
    """Frames in transit from one device to the other, in order."""

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self._target = target
        self._frames: collections.deque[tuple[float, bytes]] = collections.deque()
        self._queued_bytes = 0

    @property
    def next_due_s(self) -> float | None:
        return self._frames[0][0] if self._frames else None

    def take_in(self, delay_s: float, loss: float) -> None:
        """Read the frames that have arrived. `loss`: the fraction of frames to drop, 0 to 1."""
        for _ in range(_FRAMES_AT_ONCE):
            try:
                frame = os.read(self.source, _FRAME_BYTES)
            except OSError:  # no more frames, or the device is down
                return
            is_full = self._queued_bytes + len(frame) > _MAX_QUEUED_BYTES
            if not is_full and (not loss or random.random() >= loss):
                self._frames.append((time.monotonic() + delay_s, frame))
                self._queued_bytes += len(frame)

    def give_out(self) -> None:
        """Write the frames whose delay is over."""
        now_s = time.monotonic()
        while self._frames and self._frames[0][0] <= now_s:
            _, frame = self._frames.popleft()
            self._queued_bytes -= len(frame)
            with contextlib.suppress(OSError):  # the device is down, and drops frames as any does
                os.write(self._target, frame)


def tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _TAP | _NO_PACKET_INFO | _WITH_OFFLOAD_HEADER
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _CHECKSUM_AND_TCP_SEGMENTS)
    return device


def main() -> None:
    near, far, delay_ms, loss_percent, life = sys.argv[1:]
    print(os.getpid(), flush=True)
    if not sys.stdin.readline():
        return
    try:
        devices = [tap(near), tap(far)]
    except OSError as error:
        sys.exit(f"a delay is not available here: /dev/net/tun: {error.strerror}")
    print("ready", flush=True)
    directions = [Direction(*devices), Direction(*reversed(devices))]
    watched = [*devices, sys.stdin.fileno()] if life == "owned" else devices
    while True:
        due_s = [way.next_due_s for way in directions if way.next_due_s is not None]
        wait_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
        readable, _, _ = select.select(watched, [], [], wait_s)
        if sys.stdin.fileno() in readable:
            return
        for way in directions:
            if way.source in readable:
                way.take_in(float(delay_ms) / 1000, float(loss_percent) / 100)
            way.give_out()


if __name__ == "__main__":
    main()
