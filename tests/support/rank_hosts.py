"""Hosts for ranks on one machine: network namespaces with names of their own, joined by a switch that delays and loses
packets.

    python tests/support/rank_hosts.py 4 -- chunkrt run MODEL -p TEXT

runs the command on 4 ranks, each on its own host. Root, iproute2 and /dev/net/tun are needed. The switch is a thread of
this process and not the kernel's netem, which many kernels lack.
"""

from __future__ import annotations

import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

DELAY_S, LOSS = 0.002, 0.001
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
LAUNCHER = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=PREFIX${1##*.}
shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; exec $*"
"""
"""Program that mpiexec calls as it calls ssh: with options, an address and a command."""


class Switch:
    """Forwards frames between TAP devices, each to all other devices.

    Attributes:
        num_forwarded: number of frames that were forwarded.
        num_lost: number of frames that were dropped.
    """

    def __init__(self, devices: Sequence[int], *, delay_s: float, loss: float) -> None:
        self._devices, self._delay_s, self._loss = devices, delay_s, loss
        self._random, self._is_over = random.Random(1), Event()
        self.num_forwarded = self.num_lost = 0
        self._thread = Thread(target=self._forward, daemon=True)

    def start(self) -> None:
        """Start to forward."""
        self._thread.start()

    def close(self) -> None:
        """Stop forwarding."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _forward(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        while not self._is_over.is_set():
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, source, frame = heapq.heappop(waiting)
                for device in self._devices:
                    if device != source:
                        os.write(device, frame)
            wait = min(waiting[0][0] - now, 0.1) if waiting else 0.1
            for device in select.select(self._devices, [], [], wait)[0]:
                frame = os.read(device, 65536)
                if self._random.random() < self._loss:
                    self.num_lost += 1
                    continue
                self.num_forwarded += 1
                heapq.heappush(waiting, (time.monotonic() + self._delay_s, self.num_forwarded, device, frame))


def reason_against_hosts() -> str:
    """Return the reason why hosts cannot be made here; empty if they can."""
    if not sys.platform.startswith("linux") or os.geteuid():
        return "network namespaces need Linux and root"
    if missing := [name for name in ("ip", "unshare") if shutil.which(name) is None]:
        return f"{missing[0]} is not installed"
    name = f"crt{os.getpid()}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"`ip netns add` failed: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return "" if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "/dev/net/tun cannot be opened"


@contextmanager
def hosts(
    number: int, folder: Path, *, delay_s: float = DELAY_S, loss: float = LOSS
) -> Iterator[tuple[Sequence[str], Switch]]:
    """Make hosts, and yield the beginning of a command that runs another command on one rank on each host, and the
    switch between the hosts.
    """
    import fcntl  # Windows has none

    prefix = f"crt{os.getpid()}h"
    names = [f"{prefix}{index}" for index in range(1, number + 1)]
    devices: list[int] = []
    switch = Switch(devices, delay_s=delay_s, loss=loss)

    def run(command: str) -> None:
        subprocess.run(command.split(), check=True, capture_output=True, text=True)

    try:
        for index, name in enumerate(names, 1):
            device = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
            devices.append(device)
            run(f"ip netns add {name}")
            run(f"ip link set {name} netns {name}")
            run(f"ip -n {name} link set lo up")
            run(f"ip -n {name} addr add 10.77.0.{index}/24 dev {name}")
            run(f"ip -n {name} link set {name} up")
        switch.start()
        launcher = folder / "launcher.sh"
        launcher.write_text(LAUNCHER.replace("PREFIX", prefix))
        launcher.chmod(0o755)
        mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        addresses = ",".join(f"10.77.0.{index}" for index in range(1, number + 1))
        start = ["ip", "netns", "exec", names[0], str(mpiexec), "-launcher", "ssh", "-launcher-exec", str(launcher)]
        yield [*start, "-iface", names[0], "-hosts", addresses, "-ppn", "1", "-n", str(number)], switch
    finally:
        switch.close()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        for device in devices:
            os.close(device)


def main() -> int:
    """Run a command on hosts; see the module."""
    from tempfile import TemporaryDirectory

    if reason := reason_against_hosts():
        sys.exit(reason)
    number, command = int(sys.argv[1]), sys.argv[sys.argv.index("--") + 1 :]
    with TemporaryDirectory() as folder, hosts(number, Path(folder)) as (start, switch):
        status = subprocess.run([*start, *command]).returncode
        print(f"the switch lost {switch.num_lost} packets", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
