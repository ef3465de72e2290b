"""bfloat16 against FlashAttention-2 in PyTorch: ``python -m cupyflash.bench.flash2``.

PyTorch is a peer here, needed by nothing else. Both start from the same memory; results are
compared before anything is timed, and the two take turns.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cupyflash._cuda.device import current, require_cupy
from cupyflash.attention import (
    flash_attention,
    flash_attention_backward,
    flash_attention_forward,
)
from cupyflash.bench.timing import device_milliseconds
from cupyflash.errors import NoDeviceError

HIDDEN = 2048  # heads * head_dim
TOKENS = 16384  # batch * seqlen


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument(
        "--seqlens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384]
    )
    arguments = parser.parse_args()
    print(f"{current().name}: bfloat16, TFLOP/s, cupyflash / FlashAttention-2 (causal as half)")
    for head_dim in arguments.head_dims:
        for causal in (False, True):
            for seqlen in arguments.seqlens:
                report(head_dim, seqlen, causal)


def report(head_dim: int, seqlen: int, causal: bool) -> None:
    """Check one shape, time both directions of both and print a line."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    cupy = require_cupy()
    batch, heads = max(1, TOKENS // seqlen), HIDDEN // head_dim
    tensors = [
        torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    ]
    query, key, value, grad_out = (cupy.from_dlpack(tensor) for tensor in tensors)
    leaves = [tensor.transpose(1, 2).detach().requires_grad_() for tensor in tensors[:3]]

    def peer() -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(*leaves, is_causal=causal)

    peer_out = peer()
    out, saved = flash_attention_forward(query, key, value, causal=causal)

    def peer_backward() -> Any:
        grad = tensors[3].transpose(1, 2)
        return torch.autograd.grad(peer_out, leaves, grad, retain_graph=True)

    grads = flash_attention_backward(grad_out, saved)
    for mine, its in zip((out, *grads[:3]), (peer_out, *peer_backward()), strict=True):
        its = its.detach().transpose(1, 2).float()
        error = ((torch.from_dlpack(mine).float() - its).norm() / its.norm()).item()
        if not error < 1e-2:
            raise RuntimeError(f"results differ by {error} at {seqlen=}, {head_dim=}, {causal=}")
    with torch.no_grad():
        forward = device_milliseconds(
            {"mine": lambda: flash_attention(query, key, value, causal=causal), "peer": peer}
        )
    backward = device_milliseconds(
        {"mine": lambda: flash_attention_backward(grad_out, saved), "peer": peer_backward}
    )
    operations = 4 * batch * heads * seqlen**2 * head_dim * (0.5 if causal else 1)
    columns = [
        f"{name} {share * operations / times['mine'] / 1e9:4.0f} /"
        f" {share * operations / times['peer'] / 1e9:4.0f} = {times['peer'] / times['mine']:4.2f}"
        for name, share, times in (("forward", 1, forward), ("backward", 2.5, backward))
    ]
    kind = "causal" if causal else "full"
    print(f"d {head_dim:3} {kind:6} {seqlen:5}: {'  '.join(columns)}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except NoDeviceError as error:
        sys.exit(str(error))
