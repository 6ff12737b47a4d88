"""List the GPUs that are known."""

from __future__ import annotations

from dataclasses import asdict

from ..errors import UsageError
from ..spec.gpu import GPUS, Gpu, present_gpu
from . import show
from .app import app
from .options import JsonOption
from .output import print_json


@app.command()
def gpus(as_json: JsonOption = False) -> None:
    """Known GPUs, their limits and rates, and which is present."""
    present = _present()
    if as_json:
        print_json([{**asdict(gpu), "served": gpu.served, "present": gpu is present} for gpu in GPUS.values()])
    else:
        show.gpus(GPUS.values(), present)


def _present() -> Gpu | None:
    try:
        return present_gpu()
    except UsageError:
        return None
