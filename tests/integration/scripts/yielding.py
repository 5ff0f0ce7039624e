"""A node that sends bulk data all the time, and 24 MB of a collective now and then.

Usage: yielding.py receive PORT | yielding.py send HOST PORT yields|not
"""

import fcntl
import json
import socket
import struct
import sys
import threading
import time
from statistics import median

from ftrun.smp.redundancy.other_traffic import OtherTraffic
from ftrun.wire.transport.bulk_socket import BulkSocket
from ftrun.wire.transport.handshake import AuthSession, PeerIdentity

SIOCOUTQ = 0x5411
COLLECTIVE = bytes(24 << 20)
FRAME = bytes(1 << 20)


def receive(port: int) -> None:
    with socket.create_server(("0.0.0.0", port)) as listener:
        while True:
            threading.Thread(target=discard, args=(listener.accept()[0],), daemon=True).start()


def discard(connection: socket.socket) -> None:
    while connection.recv(1 << 20):
        pass


def connected(address: tuple[str, int]) -> socket.socket:
    """Wait until the receiver listens."""
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.05)


def send(address: tuple[str, int], *, yields: bool) -> None:
    """Print the seconds of a collective, and the bulk frames sent during all and between them."""
    identity = PeerIdentity("run", "smp", "node", 0)
    session = AuthSession(identity, identity, b"", b"", is_authenticated=False)
    sock, other = connected(address), connected(address)
    bulk, traffic = BulkSocket(sock, session, timeout_s=9.0), OtherTraffic()
    traffic.add(bulk)
    is_busy, is_over = threading.Event(), threading.Event()
    frames = {True: 0, False: 0}

    def send_bulk() -> None:
        while not is_over.is_set():
            if yields and (pause_s := traffic.pause_s(bulk)):
                time.sleep(pause_s)
                continue
            sock.sendall(FRAME)
            frames[is_busy.is_set()] += 1

    thread = threading.Thread(target=send_bulk)
    thread.start()
    took_s = []
    for _ in range(4):
        time.sleep(0.7)
        is_busy.set()
        started_s = time.monotonic()
        other.sendall(COLLECTIVE)
        while struct.unpack("i", fcntl.ioctl(other, SIOCOUTQ, bytes(4)))[0]:
            time.sleep(0.001)
        took_s.append(time.monotonic() - started_s)
        is_busy.clear()
    is_over.set()
    thread.join()
    found = {"took_s": median(took_s), "during": frames[True], "between": frames[False]}
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    else:
        send((sys.argv[2], int(sys.argv[3])), yields=sys.argv[4] == "yields")
