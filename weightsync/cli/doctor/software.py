"""Python, the native core, torch, ZeroMQ, and the optional packages."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from pathlib import Path

from weightsync.cli.doctor.finding import Finding, State

OLDEST_PYTHON = (3, 10)


def check_python() -> Finding:
    python = f"{platform.python_implementation()} {platform.python_version()}"
    found = f"{python} on {platform.system()} {platform.release()}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding(
            "python", State.FAIL, found, "weightsync is not tested on it", "install Python 3.10 or newer"
        )
    if platform.system() != "Linux":
        cost = "shared memory segments, remap and huge pages are Linux features"
        return Finding("python", State.FAIL, found, cost, "run trainers and servers on Linux")
    return Finding("python", State.OK, found)


def check_native_core() -> Finding:
    from weightsync import _native as native

    if native.IS_NATIVE:
        used = " and ".join(name.upper() for name, is_there in native.features().items() if is_there)
        return Finding("native core", State.OK, f"built and loaded, with {used or 'portable code only'}")
    return Finding(
        "native core",
        State.WARN,
        "not loaded; the pure Python twin is used",
        "the same results, but copies and digests are many times slower and hold the interpreter",
        "install a wheel, or g++ and then: "
        "WEIGHTSYNC_NATIVE=require pip install --force-reinstall --no-deps weightsync",
    )


def check_cpu() -> Finding:
    flags: set[str] = set()
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in {"flags", "Features"}:
            flags = set(value.split())
        elif key.strip() == "model name":
            model = value.strip()
    if platform.machine() not in {"x86_64", "AMD64"}:
        found = f"{model}: portable code, vectorised by the compiler"
        return Finding("cpu", State.OK, found)
    if "avx2" in flags:
        return Finding("cpu", State.OK, f"{model}: AVX2")
    cost = "copies and digests use portable code, at a fraction of the memory bandwidth"
    return Finding(
        "cpu", State.WARN, f"{model}: no AVX2", cost, "use a CPU, or a virtual machine type, that has AVX2"
    )


def check_torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding(
            "torch",
            State.FAIL,
            f"not importable: {error}",
            "weightsync moves torch tensors",
            "pip install torch",
        )
    devices = f"{torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else "no CUDA device"
    return Finding("torch", State.OK, f"{torch.__version__}, {devices}")


def check_encryption() -> Finding:
    import zmq

    found = f"pyzmq {zmq.pyzmq_version()}, libzmq {zmq.zmq_version()}"
    if zmq.has("curve"):
        return Finding("encryption", State.OK, f"CURVE, {found}")
    cost = "keys can't be used, so addresses that other hosts reach need insecure=True"
    return Finding(
        "encryption",
        State.WARN,
        f"no CURVE in {found}",
        cost,
        "install the pyzmq wheel: pip install --force-reinstall pyzmq",
    )


def check_cupy() -> Finding:
    has_gpu = Path("/proc/driver/nvidia/version").exists()
    return _package("cupy", "GPU kernels", "pip install 'weightsync[gpu]'", "an NVIDIA GPU", has_gpu)


def check_nixl() -> Finding:
    has_rdma = any(Path("/sys/class/infiniband").glob("*"))
    return _package("nixl", "RDMA transport", "pip install 'weightsync[nixl]'", "an RDMA device", has_rdma)


def _package(name: str, what: str, fix: str, needs: str, is_useful: bool) -> Finding:
    if importlib.util.find_spec(name) is not None:
        return Finding(name, State.OK, f"installed, for the {what}")
    if not is_useful:
        return Finding(name, State.OK, f"not installed, and not needed: this host has not got {needs}")
    return Finding(name, State.WARN, f"not installed, though this host has {needs}", f"no {what}", fix)
