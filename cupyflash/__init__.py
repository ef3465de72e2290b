"""cupyflash: exact FlashAttention, forward and backward, for NumPy and CuPy arrays."""

from cupyflash import score_mods
from cupyflash.attention import (
    choose_tiling,
    flash_attention,
    flash_attention_backward,
    flash_attention_forward,
)
from cupyflash.block_mask import BlockMask
from cupyflash.errors import CompileError, NoDeviceError, UnsupportedError
from cupyflash.kvcache import flash_attention_with_kvcache
from cupyflash.merge import merge_states
from cupyflash.quantize import quantize_fp8
from cupyflash.score_mod import ScoreMod
from cupyflash.state import Gradients, SavedState
from cupyflash.tiling import Tiling
from cupyflash.varlen import flash_attention_varlen, flash_attention_varlen_forward

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "CompileError",
    "Gradients",
    "NoDeviceError",
    "SavedState",
    "ScoreMod",
    "Tiling",
    "UnsupportedError",
    "choose_tiling",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_forward",
    "flash_attention_varlen",
    "flash_attention_varlen_forward",
    "flash_attention_with_kvcache",
    "merge_states",
    "quantize_fp8",
    "score_mods",
]
