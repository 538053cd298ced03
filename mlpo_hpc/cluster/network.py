"""Addresses and ports that ranks meet at."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import MutableMapping

import psutil

from mlpo_hpc.errors import ConfigError, here

INTERFACE = "MLPO_HPC_INTERFACE"
"""Names the network interface to meet on, such as ``hsn0``."""

PORTS = range(20000, 32000)
"""Below those that Linux hands out by itself."""

MAX_TRIES = 100


def use_interface(environ: MutableMapping[str, str]) -> None:
    """Let gloo and NCCL use the interface of `INTERFACE` too, unless they were told another."""
    if INTERFACE in environ:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environ.setdefault(name, environ[INTERFACE])


def address_of(interface: str) -> str:
    """The address of a network interface of this host.

    Raises
    ------
    ConfigError
        If there is no such interface, or it has no address.
    """
    found = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in found.get(interface, ()):
            if entry.family == family:
                return str(entry.address)
    raise ConfigError(f"{here()} has no address on a network interface {interface!r}; it has {', '.join(found)}")


def port_of_job(job_step: str) -> int:
    """The same port for the same job step."""
    return PORTS[int(hashlib.sha256(job_step.encode()).hexdigest(), 16) % len(PORTS)]


def first_free_port(job_step: str = "") -> int:
    """A TCP port that is free on this host now: the job step's, or one of those that follow.

    Raises
    ------
    ConfigError
        If there is none.
    """
    begin = port_of_job(job_step or os.urandom(8).hex()) - PORTS.start
    for offset in range(MAX_TRIES):
        port = PORTS[(begin + offset) % len(PORTS)]
        if is_free(port):
            return port
    raise ConfigError(f"no free port found on {here()}: set MASTER_PORT")


def is_free(port: int) -> bool:
    """Whether nobody listens on a TCP port of this host."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not count
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
