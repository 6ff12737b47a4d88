"""Say what a folder of FlashAttention-2's cubins is made of and by: versions.json, beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

FILE = "versions.json"


class Versions(NamedTuple):
    """Of the sources and of the compiler."""

    flash_attn: str
    nvcc: str

    def sign(self, folder: Path) -> None:
        """Write them down. Raises SystemExit if the folder holds cubins of others."""
        file = folder / FILE
        if file.exists() and Versions.of(folder) != self:
            raise SystemExit(f"{folder} holds cubins of {Versions.of(folder)}, not of {self}: take another folder.")
        file.write_text(json.dumps(self._asdict()) + "\n")

    @classmethod
    def of(cls, folder: Path) -> Versions:
        """Those of a folder. Raises SystemExit if it is none of compile_flash_attention_2.py."""
        try:
            return cls(**json.loads((folder / FILE).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise SystemExit(
                f"{folder} is no folder that compile_flash_attention_2.py made: {FILE}: {error}"
            ) from error
